"""Trace files as bytes: compression, caps, damage, files that want to do harm. Nothing crashes, hangs or unpickles."""

from __future__ import annotations

import gzip
import json
import pickle
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from epicycle.tools.replaying.errors import Faults, TraceError
from epicycle.tools.replaying.formats.registry import choose
from epicycle.tools.replaying.source import Limits, Source
from tests.fakes.replay import read_all

ROW = b'{"request_id": "a", "input_length": 3}\n'
CHUNK_BYTES = Limits().chunk_bytes
SMALL = Limits(line_bytes=1000, document_bytes=1000, growth_from=1 << 16)


PART_BYTES = 1 << 14
KEPT_ROWS_BYTES = 10_000 * 600  # what the rows themselves would take, if they were kept


class Opened:
    """A file of the size of a big trace that is nowhere whole: `path.open` for Source."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts, self._rest, self._at = parts, b"", 0

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, size: int) -> bytes:
        if self._at == 0 and size == 8:
            return b"Timestam"
        while len(self._rest) < size and (part := next(self._parts, b"")):
            self._rest += part
        taken, self._rest = self._rest[:size], self._rest[size:]
        self._at += len(taken)
        return taken

    def seek(self, _: int) -> None:
        pass

    def tell(self) -> int:
        return self._at


def big_csv(rows: int) -> Iterator[bytes]:
    yield b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    for start in range(0, rows, 1000):
        yield b"".join(b"%d,GPT-4,512,128,640,API log\n" % at for at in range(start, start + 1000))


def peak_bytes(rows: int, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(Path, "open", lambda *_, **__: Opened(big_csv(rows)))
    source = Source(Path("big.csv"), Limits(chunk_bytes=PART_BYTES))
    tracemalloc.start()
    try:
        assert rows == sum(1 for _ in choose(source, "burstgpt").rows(source, Faults()))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_rows_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of four million rows differs from these in its length only."""
    short, long = peak_bytes(2_000, monkeypatch), peak_bytes(12_000, monkeypatch)
    assert long < short + KEPT_ROWS_BYTES // 10


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_pickle_is_refused_by_its_first_bytes(protocol: int, pack: object, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(pack(pickle.dumps([{"input_length": 3}], protocol)))  # type: ignore[operator]
    with pytest.raises(TraceError, match="a pickle, which is never read"):
        read_all(path)


@pytest.mark.parametrize("protocol", [0, 1])
def test_an_old_pickle_is_no_trace_either(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(pickle.dumps([{"input_length": 3}], protocol))
    with pytest.raises(TraceError, match="no format knows"):
        read_all(path)


def test_archives_and_other_containers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("trace.jsonl", ROW)
    with pytest.raises(TraceError, match="zip archive"):
        read_all(path)
    path.write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(TraceError, match="parquet"):
        read_all(path)


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
@pytest.mark.parametrize("line", [b"", ROW, b" " * 99 + b"\n"])
def test_a_bomb_is_an_error_long_before_it_is_unpacked(kind: str, line: bytes, tmp_path: Path) -> None:
    """Rows, blanks and one endless line of 16 MiB in a few kilobytes."""
    content = (line or bytes(1 << 20)) * ((1 << 24) // (len(line) or 1 << 20))
    packed = gzip.compress(content) if kind == "gzip" else pytest.importorskip("backports.zstd").compress(content)
    path = tmp_path / "trace.jsonl"
    path.write_bytes(packed)
    faults = Faults("skip")
    with pytest.raises(TraceError, match=r"grows more than|no format knows|is empty"):
        read_all(path, faults=faults, limits=SMALL)


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_a_damaged_file_is_an_error_that_names_it(kind: str, tmp_path: Path) -> None:
    lines = b"".join(json.dumps({"request_id": f"{n}", "input_length": n + 1}).encode() + b"\n" for n in range(20_000))
    packed = gzip.compress(lines) if kind == "gzip" else pytest.importorskip("backports.zstd").compress(lines)
    path = tmp_path / "trace.jsonl"
    for broken in (packed[: len(packed) // 2], packed[: len(packed) // 2] + b"\xff" * 50 + packed[-9:]):
        path.write_bytes(broken)
        with pytest.raises(TraceError, match=r"trace\.jsonl"):
            read_all(path)


def test_a_line_over_the_cap_is_told_with_its_number_or_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    long = json.dumps({"request_id": "b", "text_input": "x" * (10 << 20)}).encode() + b"\n"
    path.write_bytes(ROW + long + ROW.replace(b'"a"', b'"c"'))
    with pytest.raises(TraceError, match=r"trace\.jsonl:2: .*--max-line-mib"):
        read_all(path)
    faults = Faults("skip")
    assert ["a", "c"] == [found.row.request_id for found in read_all(path, faults=faults)]
    assert [1, 3] == [found.line for found in read_all(path, faults=faults)]
    assert 2 == faults.skipped["bad row"]
    assert ["a", "b", "c"] == [f.row.request_id for f in read_all(path, limits=Limits(line_bytes=11 << 20))]


def test_lines_that_cross_chunks_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    texts = ["x" * (CHUNK_BYTES // 3 + n) for n in range(7)]
    path.write_text("".join(json.dumps({"request_id": f"{n}", "text_input": t}) + "\n" for n, t in enumerate(texts)))
    assert texts == [found.row.text_input for found in read_all(path)]


def test_elements_of_a_list_that_cross_chunks_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    words = ["wörd " * (CHUNK_BYTES // 9), "b", "c" * CHUNK_BYTES]
    talk = [{"from": "gpt", "value": "ok"}]
    talks = [{"id": f"{n}", "conversations": [{"from": "human", "value": w}, *talk]} for n, w in enumerate(words)]
    path.write_text(json.dumps(talks, ensure_ascii=False, indent=2))
    rows = read_all(path)
    assert words == [found.row.messages[0]["content"] for found in rows if found.row.messages]
    assert [2, 15, 28] == [found.line for found in rows]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "empty"),
        (b"\n\n  \n", "empty"),
        (b"[" * 300_000, "no format knows|nested|JSON"),
        (b'{"requests": ' + b"[" * 300_000, "requests"),
        (b'[{"id": "a", "conversations": [', "JSON"),
        (b'[{"id": "\xff", "conversations": []}]', "UTF-8"),
        (b'{"requests": [{"t": 1, "hash_ids": [1]}]', "JSON"),
        (b'{"request_id": "\xff", "input_length": 1}\n', "UTF-8|JSON|utf-8"),
        (b'{"request_id": "a", "input_length": ' + b"9" * 5000 + b"}\n", "input_length|JSON|Number"),
    ],
)
def test_what_is_no_trace_is_an_error_and_no_crash(content: bytes, part: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=part):
        read_all(path)


def test_a_document_over_the_cap_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"requests": [{"t": 0, "hash_ids": [1]}] * 100}, indent=1))
    with pytest.raises(TraceError, match="more than 1000 bytes"):
        read_all(path, limits=SMALL)


def test_a_missing_zstd_package_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    zstd = pytest.importorskip("backports.zstd")
    path = tmp_path / "trace.jsonl"
    path.write_bytes(zstd.compress(ROW))
    monkeypatch.setitem(__import__("sys").modules, "backports", None)
    with pytest.raises(TraceError, match=r"epicycle\[replay\]"):
        read_all(path)
