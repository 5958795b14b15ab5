"""What a workload is run beside: the same requests with one thing changed.

Owns the names of sides, what each changes, and the comparison of two sides: ratios of their medians, and how many
outputs are equal. Pure; must not know engines or servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from epicycle.tools.bench_load import Record
from epicycle.tools.bench_workload import Workload, WorkloadError
from epicycle.tools.engine_options import parse_options

NAMES = ("no-prefix-cache", "no-arrivals", "no-longest")


@dataclass(frozen=True, kw_only=True)
class Side:
    """`options` need an engine of their own; everything else changes what is sent to the one that is there."""

    name: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    prefix_cache: bool = True
    has_arrivals: bool = True
    has_longest: bool = True

    def changed(self, workload: Workload) -> Workload:
        """The workload of this side. Raises WorkloadError where the side would be no other."""
        if not self.has_arrivals and workload.arrivals is None:
            raise WorkloadError(f"{workload.name} has no arrivals to leave out")
        if not self.has_longest and len(set(workload.prompts)) < 2:
            raise WorkloadError(f"{workload.name} has no longest prompt to leave out")
        return workload if self.has_arrivals else msgspec.structs.replace(workload, arrivals=None)

    def left_out(self, workload: Workload) -> frozenset[int]:
        """Numbers of the workload's requests that this side doesn't send."""
        if self.has_longest:
            return frozenset()
        return frozenset({max(range(workload.requests), key=workload.prompt_tokens)})


def read_side(text: str) -> Side:
    """A side by its name, or OPTION=VALUE for another engine option. Raises OptionError or WorkloadError."""
    match text:
        case "no-prefix-cache":
            return Side(name=text, prefix_cache=False)
        case "no-arrivals":
            return Side(name=text, has_arrivals=False)
        case "no-longest":
            return Side(name=text, has_longest=False)
    if "=" not in text:
        raise WorkloadError(f"--beside {text}: neither OPTION=VALUE nor one of {', '.join(NAMES)}")
    return Side(name=text, options=parse_options([text]))


def ratios(plain: object, side: object) -> Any:
    """The plain run's number over the side's, in the same structure; None where there is no such ratio."""
    if isinstance(plain, dict) and isinstance(side, dict):
        found = {name: ratios(plain[name], side[name]) for name in plain if name in side}
        return {name: value for name, value in found.items() if value not in (None, {})}
    if isinstance(plain, int | float) and isinstance(side, int | float) and side:
        return plain / side
    return None


def equal_outputs(plain: Sequence[Record], side: Sequence[Record]) -> dict[str, int]:
    """Of the requests that both sides sent: how many gave the same tokens at the same depths."""
    theirs = {one.number: (one.tokens, one.depths) for one in side}
    both = [one for one in plain if one.number in theirs]
    return {"equal": sum((one.tokens, one.depths) == theirs[one.number] for one in both), "of": len(both)}
