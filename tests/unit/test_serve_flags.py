"""The command line of `epicycle serve` and the dispatch of commands, without starting anything."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from epicycle.__main__ import main
from epicycle.tools import serve
from epicycle.tools.commands import COMMANDS
from epicycle.tools.serve_flags import FLAGS, parser, read
from epicycle.transport.config import Config, ConfigError, value_at


def test_no_flags_are_the_defaults() -> None:
    assert Config() == read([])


def test_flags_win_over_the_file_and_set_reaches_any_field(tmp_path: Path) -> None:
    file = tmp_path / "epicycle.toml"
    file.write_text("[engine]\nslots = 3\nloops = 2\n[server]\nport = 1234\n")
    words = ["--config", str(file), "--slots", "5", "--poison", "--set", "supervisor.drain_s=1.5"]
    config = read([*words, "--set", "server.allowed_origins=http://a,http://b"])

    assert (5, 2, 1234, 1.5) == (
        config.engine.slots,
        config.engine.loops,
        config.server.port,
        config.supervisor.drain_s,
    )
    assert (True, ["http://a", "http://b"]) == (config.engine.poison, config.server.allowed_origins)


@pytest.mark.parametrize("text", ["engine.nothing=1", "engine.slots", "engine=1", "nothing.at.all=1"])
def test_set_refuses_what_is_not_a_field(text: str) -> None:
    with pytest.raises(ConfigError, match=r"not SECTION\.FIELD=VALUE"):
        read(["--set", text])


def test_every_violation_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"engine\.slots is 0.*scheduler\.max_waiting is 0"):
        read(["--slots", "0", "--max-waiting", "0"])


def test_every_flag_names_a_field_and_its_choices_are_legal() -> None:
    for flag in FLAGS:
        value_at(Config(), flag.path)
    for flag in FLAGS:
        for choice in flag.choices:
            assert choice == value_at(read([flag.name, choice]), flag.path)


def test_help_names_every_registered_exit_rule_and_model() -> None:
    text = parser().format_help()

    for word in ("latent_diff", "random_lookahead", "embedded:huginn", "last_exited"):
        assert word in text


def test_a_wrong_model_fails_at_once_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == serve.main(["--model", "gpt-9"])
    assert "embedded:ouro" in capsys.readouterr().err


def test_every_command_exists() -> None:
    assert all(find_spec(module) is not None for module, _ in COMMANDS.values())


def test_usage_lists_the_commands_and_an_unknown_one_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)
    assert 2 == main(["nonsense"])
    assert "'nonsense' is not one of serve" in capsys.readouterr().err


def test_serving_and_its_help_do_not_load_torch() -> None:
    probe = "import sys, epicycle.tools.serve, epicycle.tools.health, epicycle.__main__; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)

    assert "False" == ended.stdout.strip()
