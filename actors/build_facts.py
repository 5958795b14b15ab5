"""Which build runs, and on what: the commit of a checkout, and the host. For /version and for every figure."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from pathlib import Path

_HERE = Path(__file__).resolve()


def commit() -> str:
    """The checkout's commit, `+` behind it when tracked files differ; empty outside a checkout of ours. Runs git."""
    if not _git("ls-files", "--error-unmatch", _HERE.name):  # installed somewhere inside another repository
        return ""
    found = _git("rev-parse", "HEAD")
    return found + ("+" if found and _git("status", "--porcelain", "--untracked-files=no") else "")


@functools.cache
def commit_at_start() -> str:
    """The same, as it was when first asked: what this process has loaded doesn't change with the checkout."""
    return commit()


def host() -> dict[str, str | int]:
    """The machine as this process sees it."""
    return {
        "name": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _git(*words: str) -> str:
    command = ["git", "-C", str(_HERE.parent), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
