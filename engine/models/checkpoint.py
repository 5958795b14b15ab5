"""Is the checkpoint in a folder exactly the model its config names?

Owns finding the weight files (one file, or shards and their index) and the comparison of every stored name, shape and
dtype with the `TensorPlan`, from headers alone: nothing is allocated before all of it holds. Torch-free. It must not
read tensor data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from epicycle.engine.errors import LoadError
from epicycle.engine.models.safetensors_header import StoredTensor, read_header
from epicycle.engine.models.tensor_plan import TensorPlan

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SOURCE_DTYPES = ("F32", "F16", "BF16")
_SAMPLE_BYTES = 4096


def has_weights(folder: Path) -> bool:
    return (folder / INDEX_FILE).is_file() or (folder / SINGLE_FILE).is_file()


def scan(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in `folder`; the index, where there is one, must agree with the shards."""
    index = folder / INDEX_FILE
    if index.is_file():
        return _scan_shards(folder, _read_index(index))
    if not has_weights(folder):
        text = f"{folder}: no {SINGLE_FILE} and no {INDEX_FILE}; for random weights say --weights random"
        raise LoadError("missing_weights", text)
    return read_header(folder / SINGLE_FILE)


def check(stored: Mapping[str, StoredTensor], plan: TensorPlan) -> None:
    """Raise `LoadError` at the first tensor that is unknown, misshapen, not floating point, or missing."""
    for name, tensor in stored.items():
        if plan.ignores(name):
            continue
        shape = plan.shape(name)
        if shape is None:
            raise LoadError("unknown_tensor", f"{tensor.file.name}: tensor {name} is not part of this architecture")
        if tensor.shape != shape:
            text = (
                f"{tensor.file.name}: tensor {name} has shape {list(tensor.shape)}, the config asks for {list(shape)}"
            )
            raise LoadError("wrong_shape", text)
        if tensor.dtype not in _SOURCE_DTYPES:
            text = (
                f"{tensor.file.name}: tensor {name} is {tensor.dtype}; only {', '.join(_SOURCE_DTYPES)} can be loaded"
            )
            raise LoadError("not_floating", text)
    copies = {original for copy, original in plan.tied.items() if copy in stored}
    for name in plan.required:
        if name not in stored and name not in copies:
            raise LoadError("missing_tensor", f"tensor {name} {list(plan.required[name])} is in no weight file")


def fingerprint(folder: Path) -> str:
    """Hex SHA-256 that names these weights: config, headers, and the first 4 KiB of every tensor.

    Sampling keeps start-up short on files of many GB; two trained checkpoints that agree in all samples don't occur.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for name, tensor in sorted(scan(folder).items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.offset_bytes)
            digest.update(stream.read(min(_SAMPLE_BYTES, tensor.size_bytes)))
    return digest.hexdigest()


def _read_index(index: Path) -> Mapping[str, str]:
    """tensor -> shard; every shard a plain file name beside the index."""
    try:
        mapped = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = set(mapped.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError("bad_index", f"{index.name}: no readable weight_map: {error}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise LoadError("bad_index", f"{index.name}: {name!r} is not a plain file name ending in .safetensors")
        if not (index.parent / name).is_file():
            raise LoadError("bad_index", f"{index.name}: shard {name} does not exist")
    return dict(mapped)


def _scan_shards(folder: Path, mapped: Mapping[str, str]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for shard in sorted(set(mapped.values())):
        for name, tensor in read_header(folder / shard).items():
            if name in found:
                raise LoadError("duplicate_tensor", f"tensor {name} is in {found[name].file.name} and in {shard}")
            found[name] = tensor
    for name in sorted({*found, *mapped}):
        holder = found[name].file.name if name in found else "no shard"
        if mapped.get(name) != holder:
            listed = mapped.get(name, "nothing")
            raise LoadError("bad_index", f"{INDEX_FILE}: tensor {name} is in {holder}, the index says {listed}")
    return found
