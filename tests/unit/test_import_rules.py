"""What importing and asking for help must not load: torch above all, and heavy libraries where they aren't needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from epicycle.tools.commands import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
TORCH_FREE_FOLDERS = ("actors", "epicycle", "kvstore", "tools", "transport")
HEAVY = ("aiohttp", "torch", "zmq")
TRAINER = "train_"  # tools/train_*.py may import torch


def imported(path: Path) -> set[str]:
    """Top-level packages that a file's own import statements name, wherever they stand in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def loaded_by(program: str) -> set[str]:
    """Which of HEAVY a program has loaded at its end; it may exit by SystemExit."""
    code = f"import sys\ntry:\n    {program}\nexcept SystemExit:\n    pass\nprint(*sys.modules, file=sys.stderr)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(HEAVY) & set(ended.stderr.split())


def test_torch_is_imported_in_the_engine_and_the_trainer_only() -> None:
    files = [path for folder in TORCH_FREE_FOLDERS for path in (ROOT / folder).rglob("*.py")]
    offenders = [path for path in files if "torch" in imported(path) and not path.name.startswith(TRAINER)]

    assert len(files) > 50
    assert [] == [str(path.relative_to(ROOT)) for path in offenders]


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert set() == loaded_by("import epicycle")


def test_the_client_needs_zmq_and_nothing_heavier() -> None:
    assert {"zmq"} == loaded_by("from epicycle import AsyncClient, Client")


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], ["serve", "--help"], ["health", "--help"], ["generate", "--help"], ["nonsense"]],
)
def test_asking_for_help_does_not_load_torch(words: list[str]) -> None:
    assert "torch" not in loaded_by(f"from epicycle.__main__ import main; sys.exit(main({words!r}))")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_can_say_what_it_does(command: str) -> None:
    words = [sys.executable, "-m", "epicycle", command, "--help"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)

    assert (0, "") == (ended.returncode, ended.stderr)
    assert ended.stdout.startswith("usage: ")


def test_planning_reads_configs_without_torch() -> None:
    assert set() == loaded_by("from epicycle.tools.plan import main; main(['--json'])")
