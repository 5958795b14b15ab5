"""The flags of `epicycle serve`: a table from flag to configuration field, and how the two become one Config.

Help texts and defaults come from the configuration tree, choices from the registries; torch is not imported.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from epicycle.engine.exits.registry import RULES
from epicycle.engine.models.locate import CONFIGS, EMBEDDED
from epicycle.kvstore.layouts import LAYOUTS
from epicycle.transport.config import Config, ConfigError, load, value_at

DEFAULTS = Config()


@dataclass(frozen=True)
class Flag:
    """One flag; what isn't given here is asked of the field at `path`."""

    name: str
    path: str
    choices: tuple[str, ...] = ()
    metavar: str = ""


FLAGS = (
    Flag("--model", "engine.model", metavar=f"{{{','.join([*EMBEDDED, *CONFIGS])},FOLDER}}"),
    Flag("--weights", "engine.weights", ("auto", "random")),
    Flag("--host", "server.host"),
    Flag("--port", "server.port"),
    Flag("--served-model-name", "server.served_model_name", metavar="NAME"),
    Flag("--gateways", "server.gateways"),
    Flag("--device", "engine.device", metavar="{auto,cpu,cuda:N}"),
    Flag("--replicas", "executor.replicas", metavar="DEVICE,DEVICE"),
    Flag("--prefill", "executor.prefill", metavar="DEVICE,DEVICE"),
    Flag("--decode", "executor.decode", metavar="DEVICE,DEVICE"),
    Flag("--prefill-slots", "executor.prefill_slots"),
    Flag("--dtype", "engine.dtype", ("auto", "float32", "bfloat16", "float16")),
    Flag("--exit-rule", "engine.exit_rule", tuple(RULES)),
    Flag("--trace-file", "server.trace_file", metavar="FILE"),
    Flag("--loops", "engine.loops"),
    Flag("--slots", "engine.slots"),
    Flag("--context", "engine.context_tokens", metavar="TOKENS"),
    Flag("--page-tokens", "engine.page_tokens"),
    Flag("--kv-layout", "engine.kv_layout", metavar=f"{{{','.join(LAYOUTS)}}}"),
    Flag("--kv-memory", "engine.kv_memory_bytes", metavar="BYTES"),
    Flag("--kv-memory-shares", "executor.kv_memory_shares", metavar="BYTES,BYTES"),
    Flag("--prompt-chunk", "engine.prompt_chunk_tokens", metavar="TOKENS"),
    Flag("--numerics", "engine.numerics", ("invariant", "fast")),
    Flag("--start-state", "engine.start_state", ("noise", "zero")),
    Flag("--poison", "engine.poison"),
    Flag("--max-waiting", "scheduler.max_waiting"),
    Flag("--reservation", "scheduler.reservation", ("lifetime", "incremental")),
    Flag("--prefix-cache", "scheduler.prefix_cache"),
    Flag("--drain", "supervisor.drain_s", metavar="SECONDS"),
    Flag("--executor", "executor.kind", ("engine", "mock")),
    Flag("--mock-tick-ms", "executor.mock_tick_ms", metavar="MS"),
    Flag("--record", "record.file", metavar="FILE"),
    Flag("--record-text", "record.text"),
    Flag("--otel-endpoint", "otel.endpoint", metavar="URL"),
    Flag("--run-dir", "run_dir", metavar="DIR"),
    Flag("--single-process", "single_process"),
    Flag("--log-format", "log.format", ("auto", "json", "console")),
    Flag("--log-level", "log.level", ("debug", "info", "warning", "error")),
)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="epicycle serve", description="Serve a looped language model over HTTP.", allow_abbrev=False
    )
    for flag in FLAGS:
        made.add_argument(flag.name, dest=flag.path, default=None, help=_help(flag.path), **_kind(flag))
    made.add_argument("--config", type=Path, metavar="FILE", help="TOML file with the same tree; flags win over it")
    made.add_argument(
        "--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="any other field; may be repeated"
    )
    return made


def read(argv: Sequence[str]) -> Config:
    """The configuration of a command line. Raises ConfigError; argparse exits with 2 on an unknown flag."""
    given = vars(parser().parse_args(argv))
    toml, extra = given.pop("config"), given.pop("set")
    overrides = {path: value for path, value in given.items() if value is not None}
    overrides.update(_assignment(text) for text in extra)
    return load(toml, overrides)


def _assignment(text: str) -> tuple[str, Any]:
    path, mark, value = text.partition("=")
    try:
        current = value_at(DEFAULTS, path)
    except AttributeError:
        current = None
    if not mark or current is None or isinstance(current, msgspec.Struct):
        raise ConfigError(f"--set {text}: not SECTION.FIELD=VALUE with a field of the configuration")
    return path, _words(value) if isinstance(current, list) else value


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _kind(flag: Flag) -> dict[str, Any]:
    """What argparse needs to know, by the type of the field's default."""
    default = value_at(DEFAULTS, flag.path)
    if isinstance(default, bool):
        return {"action": argparse.BooleanOptionalAction}
    if isinstance(default, list):
        return {"type": _words, "metavar": flag.metavar}
    if flag.choices:
        return {"choices": flag.choices}
    return {"type": type(default), "metavar": flag.metavar or type(default).__name__.upper()}


def _help(path: str) -> str:
    *parents, leaf = path.split(".")
    section = value_at(DEFAULTS, ".".join(parents)) if parents else DEFAULTS
    text: str = get_type_hints(type(section), include_extras=True)[leaf].__metadata__[0].description
    default = getattr(section, leaf)
    return f"{text}{'' if default in ('', False, []) else f' (default: {default})'}".replace("%", "%%")
