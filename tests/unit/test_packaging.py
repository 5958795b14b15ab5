"""The wheel holds what the repository holds: a missing package imports fine in editable mode and is absent there."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import epicycle

ROOT = Path(__file__).resolve().parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = ("epicycle", "actors", "engine", "kvstore", "tools", "transport")


def packages_on_disk() -> list[str]:
    found = []
    for top in FOLDERS:
        for init in (ROOT / top).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT).parts
            found.append(".".join(parts if parts[0] == "epicycle" else ("epicycle", *parts)))
    return sorted(found)


def test_every_package_folder_is_listed() -> None:
    assert packages_on_disk() == sorted(SETUPTOOLS["packages"])


def test_every_top_folder_is_mapped_into_epicycle() -> None:
    expected = {"epicycle": "epicycle"} | {f"epicycle.{name}": name for name in FOLDERS if name != "epicycle"}

    assert expected == SETUPTOOLS["package-dir"]


def test_package_data_patterns_match_files() -> None:
    for package, patterns in SETUPTOOLS["package-data"].items():
        folder = ROOT / package.removeprefix("epicycle.").replace(".", "/")
        for pattern in patterns:
            assert list(folder.glob(pattern)), f"{package}: {pattern} matches nothing"


def test_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert epicycle.__version__ == project["version"]


def test_no_file_is_longer_than_the_cap() -> None:
    def cap(path: Path) -> int:
        return 700 if "kernels" in path.parts else 500

    too_long = [
        f"{path.relative_to(ROOT)}: {lines} lines"
        for top in (*FOLDERS, "tests")
        for path in (ROOT / top).rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > cap(path)
    ]

    assert too_long == []


def test_unknown_attribute_of_the_package_raises() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = epicycle.nonsense  # type: ignore[attr-defined]
