"""The configuration tree: documented, complete with defaults, and loud about everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.inspect import FloatType, IntType, Metadata, StructType, type_info

from epicycle.transport.config import RULES, Config, ConfigError, EngineConfig, Section, ServerConfig, load, violations


def leaves(kind: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted path, field, inspected type) of every setting."""
    info = type_info(kind)
    assert isinstance(info, StructType)
    for field in info.fields:
        if isinstance(field.type, StructType):
            yield from leaves(field.type.cls, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field, field.type


SETTINGS = {path: (field, kind) for path, field, kind in leaves()}


@pytest.mark.parametrize("path", SETTINGS)
def test_every_setting_has_a_default_and_a_doc_line(path: str) -> None:
    field, kind = SETTINGS[path]
    assert not field.required
    assert isinstance(kind, Metadata)
    description = (kind.extra_json_schema or {}).get("description", "")
    assert len(description) > 5, path


def test_every_number_has_a_range() -> None:
    numbers = {path for path, (_, kind) in SETTINGS.items() if isinstance(kind.type, IntType | FloatType)}
    assert set() == numbers - {path for path, _, _ in RULES}


def test_the_defaults_are_usable() -> None:
    assert [] == violations(Config())
    assert Config() == load(None, {})


def test_all_violations_are_reported_at_once_with_value_and_limit() -> None:
    config = Config(server=ServerConfig(port=70_000), engine=EngineConfig(slots=0, numerics="loose"))
    assert [
        "server.port is 70000, must be between 0 and 65535",
        "engine.numerics is 'loose', must be one of invariant, fast",
        "engine.slots is 0, must be between 1 and 4096",
    ] == violations(config)
    with pytest.raises(ConfigError) as raised:
        load(None, {"server.port": 70_000, "engine.slots": 0})
    assert "server.port is 70000" in str(raised.value)
    assert "engine.slots is 0" in str(raised.value)


def test_a_file_replaces_defaults_and_overrides_replace_the_file(tmp_path: Path) -> None:
    toml = tmp_path / "epicycle.toml"
    toml.write_text('single_process = true\n[server]\nport = 9000\n[engine]\nmodel = "folder"\n')
    config = load(toml, {"server.port": "9001", "run_dir": "/run/x"})
    assert (9001, "folder", True, "/run/x") == (
        config.server.port,
        config.engine.model,
        config.single_process,
        config.run_dir,
    )
    assert Config().scheduler == config.scheduler


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[server]\nprot = 1\n", "prot"),
        ("[sever]\nport = 1\n", "sever"),
        ('[server]\nport = "many"\n', "port"),
        ("[engine]\nslots = 1.5\n", "slots"),
        ("server = 3\n", "server"),
        ("[server\n", "line 1"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    toml = tmp_path / "epicycle.toml"
    toml.write_text(text)
    with pytest.raises(ConfigError, match=named):
        load(toml, {"server.gateways": 1})


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load(tmp_path / "absent.toml", {})


def test_an_unknown_override_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="slotz"):
        load(None, {"engine.slotz": 1})


def test_a_value_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"supervisor\.watchdog_s is nan"):
        load(None, {"supervisor.watchdog_s": float("nan")})


def test_rules_name_settings_that_exist() -> None:
    assert set() == {path for path, _, _ in RULES} - set(SETTINGS)


def test_the_tree_survives_json() -> None:
    config = load(None, {"server.allowed_origins": ["https://a.example"], "engine.slots": 3})
    assert config == msgspec.json.decode(msgspec.json.encode(config), type=Config)
