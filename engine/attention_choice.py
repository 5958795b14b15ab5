"""Which kernels compute attention: what was asked for, what this card, model and machine allow, and why it is so.

Owns the table of backends and the texts of refusals. Bits are promised within one backend, so nothing is ever replaced
silently: a backend asked for by name is used or refused. It imports no library and must not know how one is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from epicycle.engine.errors import OptionError

MODULES = {"fa2": "flash_attn.flash_attn_interface", "fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}
PACKAGES = {"fa2": "flash-attn", "fa3": "flash-attn-3", "fa4": "flash-attn-4"}
FA2_PAGE_MULTIPLE = 256  # positions; FA2 reads no other pages
HEAD_DIMS = (64, 96, 128)  # that all three have kernels for
_MAJORS = {"fa2": (8, 9), "fa3": (9,), "fa4": (9, 10)}  # of the compute capability
NO_DECODE = (("fa4", 9),)  # FA4 can't split KV there: a long context would keep one multiprocessor busy


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionFacts:
    """What a choice follows from. `capability` of the card, None where a tick is plain torch, which `plain_tick` then
    says; `page_bytes` of all planes and layers."""

    capability: tuple[int, int] | None
    plain_tick: str = ""
    dtype: str
    head_dim: int
    page_tokens: int
    page_bytes: int
    poison: bool
    installed: frozenset[str]
    late: str = ""  # why no launch of a lone row starts before its input is there; empty where they do


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """`decode` and `prompt` rows: plain, triton, fa2, fa3 or fa4."""

    decode: str
    prompt: str
    reason: str

    def line(self) -> str:
        parts = self.decode if self.decode == self.prompt else f"{self.decode} decode, {self.prompt} prompts"
        return f"attention: {parts} ({self.reason})"


def installed_libraries() -> frozenset[str]:
    """Those whose module can be found here."""
    return frozenset(name for name, module in MODULES.items() if _is_there(module))


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # a parent that isn't there, or can't be imported
        return False


def choose_attention(wanted: str, facts: AttentionFacts) -> AttentionChoice:
    """The backend of `wanted`, a value of the option `attention`. Raises OptionError with what to do instead."""
    if facts.capability is None:
        if wanted != "auto":
            raise _refused(wanted, f"{facts.plain_tick} computes attention by plain torch", "use auto")
        return AttentionChoice("plain", "plain", facts.plain_tick)
    if wanted in ("auto", "triton"):
        return AttentionChoice("triton", "triton", _triton_reason(wanted, facts) + _late(facts))
    name, reason = (wanted, "asked for by name") if wanted != "flash_attn" else _best_flash(facts)
    for is_met, problem, advice in _rules(name, facts):
        if not is_met:
            raise _refused(wanted, problem, advice)
    if (name, facts.capability[0]) in NO_DECODE:
        return AttentionChoice(
            "triton",
            name,
            f"{reason}; it can't split KV on {_card(facts)}, so decode rows stay with triton{_late(facts)}",
        )
    return AttentionChoice(name, name, reason)


def _triton_reason(wanted: str, facts: AttentionFacts) -> str:
    if wanted == "triton":
        return "asked for by name"
    others = ", ".join(sorted(facts.installed))
    return "the kernels whose bits and times are recorded" + (
        f"; {others} installed, used by name only" if others else ""
    )


def _late(facts: AttentionFacts) -> str:
    return f"; a lone row's launches wait for one another: {facts.late}" if facts.late else ""


def _best_flash(facts: AttentionFacts) -> tuple[str, str]:
    """The best FlashAttention of this card, and why."""
    assert facts.capability is not None
    match facts.capability[0]:
        case 8:
            return "fa2", f"flash_attn on {_card(facts)}"
        case 9 if "fa3" in facts.installed or "fa4" not in facts.installed:
            return "fa3", f"flash_attn on {_card(facts)}"
        case 9:
            return "fa4", f"flash_attn on {_card(facts)}, where fa3 isn't installed"
        case 10:
            return "fa4", f"flash_attn on {_card(facts)}"
        case 12:
            raise _refused("flash_attn", f"FlashAttention refuses page tables on {_card(facts)}", "use triton")
    raise _refused("flash_attn", f"no FlashAttention serves {_card(facts)}", "use triton")


def _rules(name: str, facts: AttentionFacts) -> list[tuple[bool, str, str]]:
    """(is it so, what is wrong otherwise, what to do then), in the order in which they are worth reading."""
    assert facts.capability is not None
    major = facts.capability[0]
    multiple, tokens = FA2_PAGE_MULTIPLE, facts.page_tokens
    page_gib = facts.page_bytes * multiple / tokens / 2**30
    pages = f"{name} reads pages of a multiple of {multiple} positions and page_tokens is {tokens}"
    dims = ", ".join(map(str, HEAD_DIMS))
    poison = f"{name} multiplies what lies behind a row's end by 0, and NaN stays NaN"
    missing = f"{name} isn't installed: there is no module {MODULES[name]}"
    return [
        ((name, major) != ("fa4", 12), f"fa4 refuses page tables on {_card(facts)}", "use triton"),
        (major in _MAJORS[name], f"{name} has no kernels for {_card(facts)}", "use triton or flash_attn"),
        (facts.dtype in ("bfloat16", "float16"), f"{name} computes no {facts.dtype}", "set dtype to bfloat16"),
        (facts.head_dim in HEAD_DIMS, f"heads are {facts.head_dim} wide, not one of {dims}", "use triton"),
        (
            name != "fa2" or tokens % multiple == 0,
            pages,
            f"use triton; pages of {multiple} would take {page_gib:.2f} GiB each",
        ),
        (not facts.poison, poison, "set poison to false or use triton"),
        (name in facts.installed, missing, f"install {PACKAGES[name]} or use triton"),
    ]


def _refused(wanted: str, problem: str, advice: str) -> OptionError:
    return OptionError("bad_option", f"attention is {wanted!r}, but {problem}; {advice}")


def _card(facts: AttentionFacts) -> str:
    assert facts.capability is not None
    return f"SM{facts.capability[0]}{facts.capability[1]}"
