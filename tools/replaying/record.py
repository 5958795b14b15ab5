"""The record of a run: one line of JSON a request, written as they end."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec

from epicycle.tools.replaying.errors import ReplayError
from epicycle.tools.replaying.observed import RequestRecord

BUFFER_BYTES = 1 << 20


class RecordFile:
    """`with RecordFile(path)`; without a path it writes nowhere."""

    def __init__(self, path: Path | None) -> None:
        self._file: IO[bytes] | None = None
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("wb", buffering=BUFFER_BYTES)
        except OSError as error:
            raise ReplayError(f"{path}: {error.strerror} (--out)") from None
        self._encode = msgspec.json.Encoder().encode

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, record: RequestRecord) -> None:
        if self._file is not None:
            self._file.write(self._encode(record) + b"\n")
