"""Reading the JSON header of a safetensors file, and nothing of its data.

Owns the checks that make the header trustworthy: its size, the dtypes, offsets inside the file, names that occur once
(a JSON parser would silently keep the last). Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from epicycle.engine.errors import LoadError

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies; `offset_bytes` counts from the start of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Every tensor of one file by name. Raises `LoadError` bad_file or duplicate_tensor."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        start = _LENGTH_BYTES + length
        if length > _MAX_HEADER_BYTES or start > size:
            raise LoadError(
                "bad_file", f"{file.name}: a header of {length} bytes in a file of {size} is not safetensors"
            )
        text = stream.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_refuse_duplicates(file))
        header.pop("__metadata__", None)
        return {name: _entry(file, name, value, start, size) for name, value in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise LoadError("bad_file", f"{file.name}: unreadable safetensors header: {error}") from error


def _refuse_duplicates(file: Path) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """A JSON object hook for which a name given twice is an error."""

    def hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for name, value in pairs:
            if name in seen:
                raise LoadError("duplicate_tensor", f"{file.name}: tensor {name} is listed twice")
            seen[name] = value
        return seen

    return hook


def _entry(file: Path, name: str, value: dict[str, object], start: int, file_bytes: int) -> StoredTensor:
    dtype, shape, offsets = str(value["dtype"]), value["shape"], value["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list):
        raise LoadError("bad_file", f"{file.name}: tensor {name} has no shape or offsets")
    first, last = offsets
    wanted = prod(shape) * _DTYPE_BYTES.get(dtype, 0)
    if (dtype in _DTYPE_BYTES and last - first != wanted) or not 0 <= first <= last <= file_bytes - start:
        raise LoadError("bad_file", f"{file.name}: tensor {name} lies outside the file or has the wrong size")
    return StoredTensor(file, dtype, tuple(shape), start + first, last - first)
