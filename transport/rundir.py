"""The run directory of one server: where its sockets live, who may use it, and how others find it.

Layout: ${XDG_RUNTIME_DIR:-/tmp}/epicycle-UID/PORT-XXXX/ with `lock` (flock held by the supervisor for life),
`instance.json` (what a client or the command line needs), `config.json` (what the children read) and the sockets.
Owns creation, liveness and removal; a directory whose lock nobody holds is dead. Must not know what runs inside.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from epicycle.transport.config import Config
from epicycle.transport.errors import RunDirError

INSTANCE_FILE = "instance.json"
CONFIG_FILE = "config.json"
LOCK_FILE = "lock"
LOCK_TRIES = 50
LOCK_RETRY_S = 0.01

T = TypeVar("T")


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """What is published about a server. `endpoints`: "supervisor" and "gwN.client" to ipc addresses; `executors`: their
    roles.

    Rewritten by the supervisor whenever a child comes up or goes down; a gateway that is down has no endpoint.
    """

    version: str
    host: str = "127.0.0.1"
    port: int
    run_dir: str
    endpoints: dict[str, str] = {}
    pids: dict[str, int] = {}
    executors: dict[str, str] = {}


def base_dir() -> Path:
    """The folder that holds this user's run directories; it need not exist."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"epicycle-{os.getuid()}"


def check_private(path: Path) -> None:
    """Raises RunDirError unless `path` is a real folder of ours that nobody else can enter."""
    try:
        facts = path.lstat()
    except OSError as error:
        raise RunDirError(f"run directory {path}: {error.strerror}") from error
    if not stat.S_ISDIR(facts.st_mode):
        raise RunDirError(f"run directory {path} is not a folder")
    if facts.st_uid != os.getuid():
        raise RunDirError(f"run directory {path} belongs to uid {facts.st_uid}, not to {os.getuid()}")
    if facts.st_mode & 0o077:
        mode = f"{facts.st_mode & 0o777:o}"
        raise RunDirError(f"run directory {path} has mode {mode}, must be 700: chmod it or choose another --run-dir")


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file so that readers see the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)


class RunDir:
    """A locked run directory; made by the supervisor, which keeps it open for life."""

    def __init__(self, path: Path, lock_fd: int, owns_folder: bool) -> None:
        self.path = path
        self._lock_fd = lock_fd
        self._owns_folder = owns_folder

    @classmethod
    def create(cls, port: int, explicit: str = "") -> RunDir:
        """A fresh directory for the server at `port`, or the `explicit` one (--run-dir) once nobody else holds it.

        Raises RunDirError: not private, in use, or not creatable.
        """
        return cls._adopt(Path(explicit).absolute()) if explicit else cls._fresh(port)

    @classmethod
    def _fresh(cls, port: int) -> RunDir:
        base = base_dir()
        _make_private(base)
        taken = {entry.name.lstrip(".") for entry in base.iterdir()}
        name = next(name for name in _names(port) if name not in taken)
        hidden = base / f".{name}"  # named only once locked, so that no reader takes it for a dead one
        try:
            hidden.mkdir(0o700)
        except OSError as error:
            raise RunDirError(f"run directory {hidden}: {error.strerror}") from error
        lock_fd = _open_lock(hidden)
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path = base / name
        hidden.rename(path)
        return cls(path, lock_fd, owns_folder=True)

    @classmethod
    def _adopt(cls, path: Path) -> RunDir:
        _make_private(path)
        lock_fd = _open_lock(path)
        for _ in range(LOCK_TRIES):  # find_instance holds the lock for an instant when it probes
            if _try_lock(lock_fd, fcntl.LOCK_EX):
                _remove_leftovers(path)
                return cls(path, lock_fd, owns_folder=False)
            time.sleep(LOCK_RETRY_S)
        os.close(lock_fd)
        raise RunDirError(f"run directory {path} is in use by another server; stop it or choose another --run-dir")

    def publish(self, instance: Instance) -> None:
        """Replace instance.json."""
        write_atomic(self.path / INSTANCE_FILE, msgspec.json.format(msgspec.json.encode(instance)))

    def write_config(self, config: Config) -> None:
        """For the children: read_config(run_dir) gives it back."""
        write_atomic(self.path / CONFIG_FILE, msgspec.json.format(msgspec.json.encode(config)))

    def close(self) -> None:
        """Remove the directory (of an explicit one: what we put there) and let go of the lock. Idempotent."""
        if self._lock_fd < 0:
            return
        if self._owns_folder:
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            _remove_leftovers(self.path)
        os.close(self._lock_fd)
        self._lock_fd = -1


def read_config(run_dir: Path) -> Config:
    """The configuration the supervisor wrote. Raises RunDirError."""
    return _read_json(run_dir / CONFIG_FILE, Config)


def read_instance(run_dir: Path) -> Instance:
    """What a directory publishes, alive or not. Raises RunDirError."""
    return _read_json(run_dir / INSTANCE_FILE, Instance)


def is_live(run_dir: Path) -> bool:
    """Whether a supervisor holds the directory's lock."""
    try:
        lock_fd = os.open(run_dir / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _try_lock(lock_fd, fcntl.LOCK_SH)
    finally:
        os.close(lock_fd)


def find_instance(port: int | None = None, run_dir: str | Path | None = None) -> Instance:
    """The instance at `run_dir`, or the only live one (with that port, if given). Removes this user's dead directories.

    Raises RunDirError: none, several (listed with their ports and pids), or one that is still starting.
    """
    if run_dir is not None:
        return _explicit_instance(Path(run_dir).absolute(), port)
    base = base_dir()
    if not base.exists():
        raise RunDirError(_none_text(port), code="no_instance")
    check_private(base)
    live = [path for path in sorted(base.glob("[!.]*-*")) if _keep_live(path)]
    if port is not None:
        live = [path for path in live if path.name.startswith(f"{port}-")]
    match live:
        case []:
            raise RunDirError(_none_text(port), code="no_instance")
        case [only]:
            return _started(only)
        case _:
            listed = "; ".join(_describe(path) for path in live)
            raise RunDirError(f"{len(live)} servers are running, choose with --port or --run-dir: {listed}")


def _explicit_instance(path: Path, port: int | None) -> Instance:
    check_private(path)
    if not is_live(path):
        raise RunDirError(f"no server is running in {path}")
    instance = _started(path)
    if port is not None and port != instance.port:
        raise RunDirError(f"the server in {path} has port {instance.port}, not {port}")
    return instance


def _started(path: Path) -> Instance:
    if not (path / INSTANCE_FILE).exists():
        raise RunDirError(f"the server in {path} is still starting")
    return read_instance(path)


def _none_text(port: int | None) -> str:
    where = "" if port is None else f" with port {port}"
    return f"no running server{where} under {base_dir()}; start one with `epicycle serve` or give its --run-dir"


def _describe(path: Path) -> str:
    try:
        instance = read_instance(path)
    except RunDirError:
        return f"{path} (starting)"
    return f"port {instance.port}, pid {instance.pids.get('supervisor', 0)}, {path}"


def _keep_live(path: Path) -> bool:
    """Whether `path` is a live run directory; a dead one is removed while its lock is ours."""
    try:
        lock_fd = os.open(path / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not _try_lock(lock_fd, fcntl.LOCK_EX):
            return True
        shutil.rmtree(path, ignore_errors=True)
        return False
    finally:
        os.close(lock_fd)


def _names(port: int) -> Iterator[str]:
    while True:
        yield f"{port}-{secrets.token_hex(2)}"


def _make_private(path: Path) -> None:
    try:
        path.mkdir(0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirError(f"run directory {path}: {error.strerror}") from error
    check_private(path)


def _open_lock(path: Path) -> int:
    return os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _try_lock(lock_fd: int, kind: int) -> bool:
    try:
        fcntl.flock(lock_fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_leftovers(path: Path) -> None:
    """What a killed server left in a directory of the user's choice: our files and sockets, nothing else."""
    for entry in path.iterdir():
        if entry.name in (INSTANCE_FILE, CONFIG_FILE) or entry.is_socket():
            entry.unlink(missing_ok=True)


def _read_json(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise RunDirError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RunDirError(f"{path} is not usable: {error}") from error
