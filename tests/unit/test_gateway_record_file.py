"""The recording's file: whole lines whatever the disk does, parts at a size, nothing overwritten."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from epicycle.actors.gateway.record_file import LineFile
from epicycle.actors.gateway.recording import record_path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_lines_are_there_as_soon_as_they_are_written(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "run.jsonl", part_bytes=0, keep_parts=0)
    file.write(b"one\n")
    file.write(b"two\n")
    assert {"run.jsonl": b"one\ntwo\n"} == contents(tmp_path)


def test_a_full_part_is_moved_aside_between_lines(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "run.jsonl", part_bytes=8, keep_parts=0)
    for line in (b"first\n", b"second\n", b"much too long\n", b"a\n"):
        file.write(line)
    assert {
        "run.1.jsonl": b"first\n",
        "run.2.jsonl": b"second\n",
        "run.3.jsonl": b"much too long\n",
        "run.jsonl": b"a\n",
    } == contents(tmp_path)


def test_only_so_many_parts_are_kept(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "run.jsonl", part_bytes=1, keep_parts=2)
    for number in range(12):
        file.write(f"{number}\n".encode())
    assert [b"9\n", b"10\n"] == [path.read_bytes() for path in file.parts()]
    assert b"11\n" == file.path.read_bytes()


def test_what_an_earlier_server_left_is_kept(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_bytes(b"theirs\n")
    (tmp_path / "run.7.jsonl").write_bytes(b"older\n")
    (tmp_path / "running.1.jsonl").write_bytes(b"no part of this\n")
    file = LineFile(tmp_path / "run.jsonl", part_bytes=0, keep_parts=0)
    file.write(b"ours\n")
    assert ["run.7.jsonl", "run.8.jsonl"] == [path.name for path in file.parts()]
    assert b"ours\n" == file.path.read_bytes()


FILLS_UP = """
import resource, sys
from pathlib import Path
from epicycle.actors.gateway.record_file import LineFile

file = LineFile(Path(sys.argv[1]), part_bytes=0, keep_parts=0)
file.write(b"before\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
try:
    file.write(b"too long\\n")  # the kernel takes three bytes of it
except OSError as error:
    print(type(error).__name__, error.errno)
print(Path(sys.argv[1]).read_bytes())
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
file.write(b"after\\n")
"""


def test_a_line_that_does_not_fit_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    words = [sys.executable, "-c", FILLS_UP, str(path)]
    ended = subprocess.run(words, capture_output=True, text=True, check=True)

    assert [f"OSError {errno.EFBIG}", repr(b"before\n")] == ended.stdout.splitlines()
    assert b"before\nafter\n" == path.read_bytes()


def test_a_line_that_cannot_be_taken_back_is_followed_by_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = LineFile(tmp_path / "run.jsonl", part_bytes=0, keep_parts=0)
    file.write(b"before\n")

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", broken)
        patch.setattr(os, "ftruncate", broken)
        with pytest.raises(OSError, match="Input/output"):
            file.write(b"lost\n")
    file.write(b"after\n")
    assert {"run.1.jsonl": b"before\n", "run.jsonl": b"after\n"} == contents(tmp_path)


def test_a_file_that_got_no_line_goes_away(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "run.jsonl", part_bytes=0, keep_parts=0)
    assert {"run.jsonl": b""} == contents(tmp_path), "whether it can be written shows at once"
    file.close()
    assert {} == contents(tmp_path)


def test_a_folder_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LineFile(tmp_path / "nowhere" / "run.jsonl", part_bytes=0, keep_parts=0)


def test_gateways_write_files_of_their_own() -> None:
    assert [Path("a/run.jsonl"), Path("a/run.gw1.jsonl")] == [
        record_path(Path("a/run.jsonl"), gateway) for gateway in ("", "gw1")
    ]
