"""The commit of a build: its own checkout's, never that of a repository it merely lies in."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from epicycle.actors import build_facts

GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]


def git(folder: Path, *words: str) -> str:
    return subprocess.run([*GIT, *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def told(folder: Path) -> str:
    """What a copy of the module in `folder` says."""
    code = "import build_facts; print(build_facts.commit())"
    command = [sys.executable, "-c", code]
    environment = {"PATH": "/usr/bin:/bin:/usr/local/bin", "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """An empty repository with the module in it, not added."""
    git(tmp_path, "init", "-q")
    (tmp_path / "readme").write_text("x")
    git(tmp_path, "add", "readme")
    git(tmp_path, "commit", "-qm", "first")
    shutil.copy(build_facts.__file__, tmp_path / "build_facts.py")
    return tmp_path


def test_a_repository_around_an_install_is_not_its_own(copy: Path) -> None:
    assert "" == told(copy)


def test_a_checkout_tells_its_commit_and_whether_files_differ(copy: Path) -> None:
    git(copy, "add", "build_facts.py")
    git(copy, "commit", "-qm", "ours")
    head = git(copy, "rev-parse", "HEAD")
    assert head == told(copy)
    (copy / "readme").write_text("y")
    assert head + "+" == told(copy)


def test_the_host_is_told_in_numbers() -> None:
    host = build_facts.host()
    assert {"name", "system", "python", "cpus", "memory_bytes"} == set(host)
    assert int(host["cpus"]) >= 1 and int(host["memory_bytes"]) > 1 << 20
