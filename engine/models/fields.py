"""Strict reading of one JSON object: every key is taken, ignored by name, or refused.

Owns the checks and the wording of refusals; it knows no architecture. A parser takes what it computes with, `expect`s
what may only have one meaning here, `ignore`s what can't change a result, and `finish`es, which refuses the rest.
"""

from __future__ import annotations

from collections.abc import Mapping

from epicycle.engine.errors import ConfigError

Json = object
Number = int | float

# What transformers writes into any config and no result depends on.
COMMON_IGNORED = (
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "model_type",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)


class Fields:
    """A cursor over the keys of one config; `origin` (a file name) opens every message."""

    def __init__(self, raw: Mapping[str, Json], origin: str) -> None:
        self._left = dict(raw)
        self._origin = origin

    def integer(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """The one integer under any spelling in `names`; spellings that are both present must agree."""
        value = self._take(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self._refusal("bad_config", names[0], value, f"an integer of at least {minimum}")
        return value

    def number(self, *names: str, default: Number | None = None) -> float:
        """A positive number."""
        value = self._take(names, default)
        if isinstance(value, bool) or not isinstance(value, Number) or not 0 < value < float("inf"):
            raise self._refusal("bad_config", names[0], value, "a positive number")
        return float(value)

    def token_id(self, name: str, vocab_size: int) -> int | None:
        """An optional token id below `vocab_size`."""
        value = self._left.pop(name, None)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
            raise self._refusal("unsupported_value", name, value, f"a token id below vocab_size {vocab_size}")
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Optional token ids: one, a list, or nothing."""
        value = self._left.pop(name, None)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for item in ids:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size:
                raise self._refusal("unsupported_value", name, value, f"token ids below vocab_size {vocab_size}")
        return tuple(ids)

    def table(self, name: str) -> Mapping[str, Json]:
        """An optional nested object; empty when absent."""
        value = self._left.pop(name, None)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._refusal("bad_config", name, value, "an object")
        return value

    def expect(self, name: str, *allowed: Json) -> None:
        """The key is absent or holds one of `allowed`: anything else is arithmetic we don't have."""
        if name not in self._left:
            return
        value = self._left.pop(name)
        if value not in allowed:
            raise self._refusal("unsupported_value", name, value, " or ".join(map(repr, allowed)))

    def expect_off(self, *names: str) -> None:
        """Each switch is absent, null, zero, false or empty."""
        for name in names:
            value = self._left.pop(name, None)
            if value:
                raise self._refusal("unsupported_value", name, value, "off")

    def expect_full_attention(self, layers: int) -> None:
        """`layer_types` is absent or says `full_attention` once per layer."""
        self.expect("layer_types", None, ["full_attention"] * layers)

    def ignore(self, *names: str) -> None:
        for name in names:
            self._left.pop(name, None)

    def finish(self) -> None:
        """Refuse whatever nobody took: an unknown key may change the arithmetic."""
        if self._left:
            listed = ", ".join(f"{key}={self._left[key]!r}" for key in sorted(self._left))
            raise ConfigError(
                "unknown_key", f"{self._origin}: unknown key {listed}; this engine would drop its meaning"
            )

    def refuse(self, name: str, value: Json, wanted: str) -> ConfigError:
        """The error for a value that breaks a rule between keys."""
        return self._refusal("unsupported_value", name, value, wanted)

    def _take(self, names: tuple[str, ...], default: Json) -> Json:
        found = [(name, self._left.pop(name)) for name in names if self._left.get(name) is not None]
        self.ignore(*names)  # a null spelling means "not given"
        if not found:
            if default is None:
                raise ConfigError("missing_key", f"{self._origin}: key {' or '.join(names)} is missing")
            return default
        for name, value in found[1:]:
            if value != found[0][1]:
                raise self._refusal("unsupported_value", name, value, f"the same as {found[0][0]}={found[0][1]!r}")
        return found[0][1]

    def _refusal(self, code: str, name: str, value: Json, wanted: str) -> ConfigError:
        text = f"{self._origin}: {name}={value!r} is not supported; it must be {wanted}"
        return ConfigError("bad_config" if code == "bad_config" else "unsupported_value", text)
