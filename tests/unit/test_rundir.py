"""Run directories: private, locked, published whole, found when alive and removed when dead."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from epicycle.transport.config import Config, EngineConfig
from epicycle.transport.errors import RunDirError
from epicycle.transport.rundir import (
    Instance,
    RunDir,
    base_dir,
    find_instance,
    is_live,
    read_config,
    read_instance,
    write_atomic,
)


@pytest.fixture(autouse=True)
def runtime_dir(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir))
    return short_dir


@pytest.fixture
def made() -> Iterator[list[RunDir]]:
    run_dirs: list[RunDir] = []
    yield run_dirs
    for run_dir in run_dirs:
        run_dir.close()


def start(made: list[RunDir], port: int, pid: int = 77) -> RunDir:
    run_dir = RunDir.create(port)
    made.append(run_dir)
    run_dir.publish(instance(run_dir.path, port, pid))
    return run_dir


def instance(path: Path, port: int, pid: int = 77) -> Instance:
    return Instance(version="0.1.0", port=port, run_dir=str(path), pids={"supervisor": pid})


def kill(run_dir: RunDir) -> None:
    """What remains of a SIGKILLed supervisor: the folder without the lock."""
    os.close(run_dir._lock_fd)
    run_dir._lock_fd = -1


def test_a_fresh_directory_is_private_short_and_named_by_its_port(made: list[RunDir], runtime_dir: Path) -> None:
    run_dir = start(made, 8000)
    assert base_dir() == runtime_dir / f"epicycle-{os.getuid()}" == run_dir.path.parent
    assert "8000-" == run_dir.path.name[:5]
    assert len("8000-XXXX") == len(run_dir.path.name)
    assert [0o700, 0o700] == [path.stat().st_mode & 0o777 for path in (run_dir.path, base_dir())]
    assert is_live(run_dir.path)


def test_without_a_runtime_dir_it_lies_under_tmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert Path(f"/tmp/epicycle-{os.getuid()}") == base_dir()


def test_closing_removes_the_directory(made: list[RunDir]) -> None:
    run_dir = start(made, 8000)
    run_dir.close()
    run_dir.close()
    assert [] == list(base_dir().iterdir())


def test_the_only_live_instance_is_found(made: list[RunDir]) -> None:
    run_dir = start(made, 8000)
    expected = instance(run_dir.path, 8000)
    assert expected == find_instance()
    assert expected == find_instance(port=8000)
    assert expected == find_instance(run_dir=run_dir.path)
    assert expected == find_instance(port=8000, run_dir=str(run_dir.path))


def test_several_instances_are_listed_and_told_apart_by_port(made: list[RunDir]) -> None:
    one, two = start(made, 8000, 11), start(made, 8001, 22)
    with pytest.raises(RunDirError, match="2 servers are running, choose with --port or --run-dir") as raised:
        find_instance()
    for part in ("port 8000, pid 11", "port 8001, pid 22", str(one.path), str(two.path)):
        assert part in str(raised.value)
    assert 8001 == find_instance(port=8001).port


def test_a_port_is_not_a_prefix_of_another(made: list[RunDir]) -> None:
    start(made, 8000)
    with pytest.raises(RunDirError, match="no running server with port 80 "):
        find_instance(port=80)


def test_no_instance_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(RunDirError, match="epicycle serve") as none:
        find_instance()
    assert "no_instance" == none.value.code


def test_a_dead_directory_is_removed_and_not_found(made: list[RunDir]) -> None:
    dead, alive = start(made, 8000), start(made, 8001)
    kill(dead)
    assert 8001 == find_instance().port
    assert (False, True) == (dead.path.exists(), alive.path.exists())


def test_a_dead_explicit_directory_is_an_error(made: list[RunDir]) -> None:
    dead = start(made, 8000)
    kill(dead)
    with pytest.raises(RunDirError, match="no server is running in"):
        find_instance(run_dir=dead.path)


def test_an_explicit_directory_with_another_port_is_an_error(made: list[RunDir]) -> None:
    run_dir = start(made, 8000)
    with pytest.raises(RunDirError, match="has port 8000, not 9"):
        find_instance(port=9, run_dir=run_dir.path)


def test_a_starting_instance_says_so(made: list[RunDir]) -> None:
    made.append(RunDir.create(8000))
    with pytest.raises(RunDirError, match="still starting"):
        find_instance()


def test_the_lock_is_seen_by_other_processes(made: list[RunDir]) -> None:
    run_dir = start(made, 8000)
    probe = "from epicycle.transport.rundir import find_instance; print(find_instance().port)"
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60)
    assert "8000" == found.stdout.strip()
    assert is_live(run_dir.path)


def test_probing_does_not_take_the_lock(made: list[RunDir]) -> None:
    run_dir = start(made, 8000)
    for _ in range(3):
        find_instance()
        assert is_live(run_dir.path)


def test_an_explicit_directory_is_made_and_emptied_but_kept(short_dir: Path) -> None:
    path = short_dir / "mine"
    run_dir = RunDir.create(8000, explicit=str(path))
    run_dir.publish(instance(path, 8000))
    assert 8000 == find_instance(run_dir=path).port
    run_dir.close()
    assert ["lock"] == [entry.name for entry in path.iterdir()]


def test_an_explicit_directory_in_use_is_refused(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epicycle.transport.rundir.LOCK_RETRY_S", 0.0)
    run_dir = RunDir.create(8000, explicit=str(short_dir / "mine"))
    with pytest.raises(RunDirError, match="in use by another server"):
        RunDir.create(8001, explicit=str(short_dir / "mine"))
    run_dir.close()


def test_what_a_killed_server_left_in_an_explicit_directory_goes_and_the_rest_stays(short_dir: Path) -> None:
    path = short_dir / "mine"
    killed = RunDir.create(8000, explicit=str(path))
    killed.publish(instance(path, 8000))
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path / "control.e1.cancel"))
    (path / "notes.txt").write_text("the user's")
    kill(killed)
    run_dir = RunDir.create(8000, explicit=str(path))
    assert ["lock", "notes.txt"] == sorted(entry.name for entry in path.iterdir())
    run_dir.close()


def test_a_directory_others_can_enter_is_refused(short_dir: Path) -> None:
    path = short_dir / "open"
    path.mkdir(0o755)
    path.chmod(0o755)
    with pytest.raises(RunDirError, match="mode 755"):
        RunDir.create(8000, explicit=str(path))
    with pytest.raises(RunDirError, match="mode 755"):
        find_instance(run_dir=path)


def test_a_link_in_place_of_the_base_is_refused(short_dir: Path) -> None:
    (short_dir / "elsewhere").mkdir(0o700)
    base_dir().symlink_to(short_dir / "elsewhere")
    with pytest.raises(RunDirError, match="not a folder"):
        RunDir.create(8000)


def test_the_directory_of_another_user_is_refused(made: list[RunDir], monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = start(made, 8000)
    monkeypatch.setattr(os, "getuid", lambda: run_dir.path.stat().st_uid + 1)
    with pytest.raises(RunDirError, match="belongs to uid"):
        find_instance(run_dir=run_dir.path)


def test_children_read_the_configuration_the_supervisor_wrote(made: list[RunDir]) -> None:
    run_dir = start(made, 8000)
    config = Config(engine=EngineConfig(model="embedded:huginn", slots=3), single_process=True)
    run_dir.write_config(config)
    assert config == read_config(run_dir.path)


def test_an_unreadable_instance_file_is_an_error_that_names_it(made: list[RunDir]) -> None:
    run_dir = start(made, 8000)
    (run_dir.path / "instance.json").write_bytes(b'{"version": 3')
    with pytest.raises(RunDirError, match=r"instance\.json is not usable"):
        read_instance(run_dir.path)
    with pytest.raises(RunDirError, match=r"config\.json: No such file"):
        read_config(run_dir.path)


def test_a_newer_servers_instance_file_is_readable(made: list[RunDir]) -> None:
    run_dir = start(made, 8000)
    tree = msgspec.json.decode((run_dir.path / "instance.json").read_bytes())
    write_atomic(run_dir.path / "instance.json", msgspec.json.encode({**tree, "added_later": 1}))
    assert instance(run_dir.path, 8000) == read_instance(run_dir.path)


def test_publishing_replaces_the_file_and_leaves_no_other(made: list[RunDir]) -> None:
    run_dir = start(made, 8000)
    run_dir.publish(instance(run_dir.path, 8000, pid=99))
    assert {"supervisor": 99} == read_instance(run_dir.path).pids
    assert ["instance.json", "lock"] == sorted(entry.name for entry in run_dir.path.iterdir())
