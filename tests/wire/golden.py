"""Every wire struct, a sample of each, and the bytes they are pinned to.

Run `python -m tests.wire.golden` after appending a field: it rewrites golden.json, and refuses any change that isn't
an append unless WIRE_VERSION was raised.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import zlib
from pathlib import Path
from typing import Any

import msgspec
from msgspec.inspect import (
    BoolType,
    BytesType,
    DictType,
    FloatType,
    IntType,
    ListType,
    NoneType,
    StrType,
    StructType,
    UnionType,
    type_info,
)

import epicycle.transport.wire as wire
from epicycle.transport.wire.base import WIRE_VERSION, Wire

GOLDEN = Path(__file__).with_name("golden.json")


def structs() -> dict[str, type[Wire]]:
    """Every subclass of Wire in the package, by name."""
    found: dict[str, type[Wire]] = {}
    for module in pkgutil.iter_modules(wire.__path__):
        for value in vars(importlib.import_module(f"{wire.__name__}.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Wire) and value is not Wire:
                assert found.setdefault(value.__name__, value) is value, f"two structs are called {value.__name__}"
    return dict(sorted(found.items()))


def tagged() -> dict[str, type[Wire]]:
    return {name: kind for name, kind in structs().items() if kind.__struct_config__.tag is not None}


def sample(kind: type[Wire]) -> Wire:
    """An instance whose fields all differ from their defaults; values come from field names, so a swap shows."""
    info = type_info(kind)
    assert isinstance(info, StructType)
    return kind(*(_value(field.type, field.name) for field in info.fields))


def _value(kind: Any, name: str) -> Any:
    number = zlib.crc32(name.encode())
    match kind:
        case IntType():
            return number
        case FloatType():
            return number / 8
        case BoolType():
            return True
        case StrType():
            return name
        case BytesType():
            return name.encode()
        case StructType(cls=cls):
            return sample(cls)
        case ListType(item_type=item):
            return [_value(item, name), _value(item, name + "2")]
        case DictType(key_type=key, value_type=value):
            return {_value(key, name): _value(value, name)}
        case UnionType(types=types):
            return _value(next(member for member in types if not isinstance(member, NoneType)), name)
        case _:
            raise AssertionError(f"no sample for {kind} ({name}): scalars, bytes, structs and flat lists only")


def entry(kind: type[Wire]) -> dict[str, Any]:
    return {
        "tag": kind.__struct_config__.tag,
        "fields": list(kind.__struct_fields__),
        "hex": msgspec.msgpack.encode(sample(kind)).hex(),
    }


def read() -> dict[str, Any]:
    golden: dict[str, Any] = json.loads(GOLDEN.read_text())
    return golden


def breaks(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The structs that an old peer would misread: gone, another tag, or fields that don't begin as they did."""
    return [
        name
        for name, pinned in old["structs"].items()
        if name not in new["structs"]
        or pinned["tag"] != new["structs"][name]["tag"]
        or pinned["fields"] != new["structs"][name]["fields"][: len(pinned["fields"])]
    ]


def current() -> dict[str, Any]:
    return {"wire_version": WIRE_VERSION, "structs": {name: entry(kind) for name, kind in structs().items()}}


def main() -> int:
    new = current()
    if GOLDEN.exists():
        old = read()
        broken = breaks(old, new)
        if broken and new["wire_version"] <= old["wire_version"]:
            print(f"not an append: {', '.join(broken)}; raise WIRE_VERSION above {old['wire_version']} first")
            return 1
    GOLDEN.write_text(json.dumps(new, indent=1) + "\n")
    print(f"{len(new['structs'])} structs pinned")
    return 0


if __name__ == "__main__":
    sys.exit(main())
