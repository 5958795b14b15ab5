"""What a figure is worth nothing without: the commit and the versions it came from. Torch-free."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("epicycle", "torch", "triton")


def commit() -> str:
    """The checkout's commit, `+` behind it when tracked files differ; empty outside a checkout."""
    found = _git("rev-parse", "HEAD")
    return found + ("+" if found and _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*words: str) -> str:
    command = ["git", "-C", str(Path(__file__).resolve().parent), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def versions() -> dict[str, str]:
    """Of the packages that a figure depends on; those not installed are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
