"""A file of whole lines that is moved aside at a size: what a recording is written to. One thread at a time.

Owns the path and its parts: `run.jsonl` is being written, `run.1.jsonl`, `run.2.jsonl`, ... are complete, oldest first.
What an earlier server or incarnation left at the path becomes a part too: nothing is overwritten. A line that doesn't
fit on the disk leaves no trace. It must not know what the lines say.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path


class LineFile:
    """Opened at once; raises OSError then and in `write`, after which the file still ends with a whole line."""

    def __init__(self, path: Path, part_bytes: int, keep_parts: int) -> None:
        """`part_bytes` 0: one part without end. `keep_parts`: complete parts kept, older ones are deleted; 0: all."""
        self.path = path
        self._part_bytes = part_bytes
        self._keep_parts = keep_parts
        self._file = -1
        self._size = 0
        self._move_aside()
        self._open()

    def write(self, lines: bytes) -> None:
        """Append `lines`, all or nothing."""
        if self._part_bytes and self._size and self._size + len(lines) > self._part_bytes:
            self.close()
        if self._file < 0:
            self._move_aside()
            self._open()
        try:
            self._append(lines)
        except OSError:
            self._forget()
            raise
        self._size += len(lines)

    def close(self) -> None:
        """Idempotent; a later write begins a new part. A file without a line goes away, since it is no trace."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            if not self._size:
                self.path.unlink(missing_ok=True)

    def parts(self) -> list[Path]:
        """The complete parts, oldest first."""
        return [path for _, path in sorted(self._numbered())]

    def _append(self, lines: bytes) -> None:
        left = memoryview(lines)
        while left:
            left = left[os.write(self._file, left) :]

    def _forget(self) -> None:
        """Take back what a failed write left. Where even that fails, the next line goes into another file."""
        try:
            os.ftruncate(self._file, self._size)
        except OSError:
            self.close()

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._file).st_size

    def _move_aside(self) -> None:
        """Make what stands at the path a part, if there is anything in it, and forget parts beyond the limit."""
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_size:
                number = max((number for number, _ in self._numbered()), default=0) + 1
                self.path.rename(self.path.with_name(f"{self.path.stem}.{number}{self.path.suffix}"))
        if self._keep_parts:
            for path in self.parts()[: -self._keep_parts]:
                path.unlink(missing_ok=True)

    def _numbered(self) -> list[tuple[int, Path]]:
        pattern = re.compile(re.escape(self.path.stem) + r"\.(\d+)" + re.escape(self.path.suffix))
        matches = ((pattern.fullmatch(path.name), path) for path in self.path.parent.iterdir())
        return [(int(match[1]), path) for match, path in matches if match]
