"""Engine options from text and from dictionaries, for the commands that load engines themselves.

Owns the parsing of OPTION=VALUE and its error texts. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from epicycle.engine.errors import OptionError
from epicycle.transport.config import Config, EngineConfig, violations


def has_option(name: str) -> bool:
    return name in EngineConfig.__struct_fields__


def parse_options(texts: Iterable[str]) -> dict[str, Any]:
    """OPTION=VALUE texts as a dictionary of typed values. Raises OptionError."""
    given: dict[str, str] = {}
    for text in texts:
        name, mark, value = text.partition("=")
        if not mark or not has_option(name):
            known = ", ".join(EngineConfig.__struct_fields__)
            raise OptionError("bad_option", f"--set {text}: not OPTION=VALUE with an option of {known}")
        given[name] = value
    read = read_options(given)
    return {name: getattr(read, name) for name in given}


def read_options(options: Mapping[str, Any]) -> EngineConfig:
    """The options of a dictionary, the rest default. Raises OptionError that names every fault."""
    try:
        read = msgspec.convert(dict(options), EngineConfig, strict=False)
    except msgspec.ValidationError as error:
        raise OptionError("bad_option", str(error)) from error
    broken = violations(Config(engine=read))
    if broken:
        raise OptionError("bad_option", "; ".join(broken))
    return read
