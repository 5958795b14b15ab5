"""A trace file as bytes, lines or JSON elements: plain, gzip or zstd, streamed, and never more of it than asked for.

Owns decompression and every cap (bytes in all, growth, length of a line). Pickles and archives are refused by their
first bytes; nothing here or above ever unpickles. It must not know what a line means.
"""

from __future__ import annotations

import codecs
import gzip
import json
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from epicycle.tools.replaying.errors import TraceError

BOM = b"\xef\xbb\xbf"
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
REFUSED = {
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "parquet; convert it to JSONL",
    b"ARROW1": "an arrow file; convert it to JSONL",
    b"SQLite": "a database",
    **{bytes((0x80, protocol)): "a pickle, which is never read" for protocol in range(6)},
}
ZSTD_WINDOW_LOG = 27  # 128 MiB: what the zstd tool itself takes without being told


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Caps of one file. `growth` is decompressed over compressed bytes, looked at after `growth_from` bytes.

    `chunk_bytes` is what is read at once.
    """

    chunk_bytes: int = 1 << 20
    line_bytes: int = 8 << 20
    document_bytes: int = 64 << 20
    total_bytes: int = 256 << 30
    growth: float = 200.0
    growth_from: int = 64 << 20


@dataclass(frozen=True)
class Line:
    """Without its newline. `is_whole` False: it was longer than the cap, and `content` is its beginning."""

    number: int
    content: bytes
    is_whole: bool = True


class Source:
    """One file. Every method reads it from its beginning."""

    def __init__(self, path: Path, limits: Limits | None = None) -> None:
        self.path = path
        self.name = str(path)
        self.limits = limits or Limits()

    def head(self) -> bytes:
        """The first decompressed bytes, with the first line whole where it isn't over the cap. Raises TraceError."""
        found = b""
        for chunk in self.chunks():
            found += chunk
            if b"\n" in found.lstrip() or len(found) > self.limits.line_bytes:
                break
        if not found.strip():
            raise TraceError("the file is empty", path=self.name)
        return found

    def chunks(self) -> Iterator[bytes]:
        """Decompressed bytes in order. Raises TraceError for damage, refused kinds and every cap."""
        try:
            with self.path.open("rb") as file:
                yield from self._bounded(file)
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"can't be read: {error}", path=self.name) from None

    def lines(self) -> Iterator[Line]:
        """Every line that isn't blank. A line over the cap comes once, cut."""
        number, rest, is_cut = 0, b"", False
        most = self.limits.line_bytes
        for chunk in self.chunks():
            *whole, tail = chunk.split(b"\n")
            for part in whole:
                number += 1
                line, rest = rest + part, b""
                line = line.removeprefix(BOM) if number == 1 else line
                if is_cut:
                    is_cut = False
                elif len(line) > most:
                    yield Line(number, line[:most], is_whole=False)
                elif line.strip():
                    yield Line(number, line)
            if is_cut:
                continue
            rest += tail
            if len(rest) > most:
                yield Line(number + 1, rest[:most], is_whole=False)
                rest, is_cut = b"", True
        if rest.strip():
            yield Line(number + 1, rest)

    def elements(self) -> Iterator[Line]:
        """The elements of a JSON list, one after the other, each with the line it begins in. Raises TraceError."""
        return _elements(self)

    def document(self) -> Line:
        """The whole file. Raises TraceError where it is over the cap."""
        whole = bytearray()
        for chunk in self.chunks():
            whole += chunk
            if len(whole) > self.limits.document_bytes:
                text = f"one JSON document of more than {self.limits.document_bytes} bytes"
                raise TraceError(text, path=self.name)
        return Line(1, bytes(whole).removeprefix(BOM))

    def _bounded(self, file: IO[bytes]) -> Iterator[bytes]:
        start = file.read(8)
        file.seek(0)
        self._refuse(start)
        reader, total, limits = _reader(file, start), 0, self.limits
        while chunk := reader.read(limits.chunk_bytes):
            if not total:
                self._refuse(chunk[:8])
            total += len(chunk)
            if total > limits.total_bytes:
                raise TraceError(f"more than {limits.total_bytes} bytes when decompressed", path=self.name)
            if total > limits.growth_from and total > limits.growth * file.tell():
                text = f"grows more than {limits.growth:g} times when decompressed: no trace does"
                raise TraceError(text, path=self.name)
            yield chunk

    def _refuse(self, start: bytes) -> None:
        for magic, what in REFUSED.items():
            if start.startswith(magic):
                raise TraceError(f"is {what}", path=self.name)


def _reader(file: IO[bytes], start: bytes) -> IO[bytes]:
    if start.startswith(GZIP):
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
    if start.startswith(ZSTD):
        return _zstd(file)
    return file


def _zstd(file: IO[bytes]) -> IO[bytes]:
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError:
        raise TraceError("zstd needs a package: pip install 'epicycle[replay]'") from None
    options = {int(zstd.DecompressionParameter.window_log_max): ZSTD_WINDOW_LOG}

    class Reader:
        """zstd's own error is no OSError."""

        def __init__(self) -> None:
            self._file = zstd.ZstdFile(file, options=options)

        def read(self, size: int) -> bytes:
            try:
                content: bytes = self._file.read(size)
                return content
            except zstd.ZstdError as error:
                raise OSError(str(error)) from None

    return Reader()  # type: ignore[return-value]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


_JSON = json.JSONDecoder(parse_constant=_no_constant)


def _elements(source: Source) -> Iterator[Line]:
    """Python's decoder only finds where an element ends."""
    decode, skip = _JSON.raw_decode, " \t\r\n,"
    chunks = iter(_text(source))
    text = next(chunks, "").removeprefix("\ufeff")
    if not text.lstrip().startswith("["):
        raise TraceError("is no JSON list", path=source.name)
    at = text.index("[") + 1
    line = 1 + text.count("\n", 0, at)
    while True:
        begin = at
        while at < len(text) and text[at] in skip:
            at += 1
        line += text.count("\n", begin, at)
        if at < len(text) and text[at] == "]":
            return
        try:
            value, end = decode(text, at)
            if end == len(text) and not isinstance(value, dict | list):
                raise ValueError("a number or word may go on")
        except (ValueError, RecursionError) as error:
            more = next(chunks, None)
            if more is None or isinstance(error, RecursionError):
                raise TraceError(f"no valid JSON: {_short(error)}", path=source.name, line=line) from None
            if len(text) - at > source.limits.line_bytes:
                text = f"no valid JSON in {source.limits.line_bytes} bytes: {_short(error)}"
                raise TraceError(text, path=source.name, line=line) from None
            text, at = text[at:] + more, 0
            continue
        yield Line(line, text[at:end].encode())
        line += text.count("\n", at, end)
        at = end


def _text(source: Source) -> Iterator[str]:
    """Chunks as text, never cut inside a character."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in source.chunks():
            yield decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise TraceError(f"is no UTF-8: {error}", path=source.name) from None


def _short(error: Exception) -> str:
    return str(error)[:200]
