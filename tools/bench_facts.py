"""What a figure is worth nothing without: the commit and the versions it came from. Torch-free."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from epicycle.actors.build_facts import commit

__all__ = ["commit", "versions"]

PACKAGES = ("epicycle", "torch", "triton")


def versions() -> dict[str, str]:
    """Of the packages that a figure depends on; those not installed are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
