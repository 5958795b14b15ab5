"""Which attention kernels are chosen, with which reason, and what is refused with which advice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from epicycle.engine.attention_choice import AttentionChoice, AttentionFacts, choose_attention
from epicycle.engine.early_start import version_of, why_late
from epicycle.engine.engine import Engine
from epicycle.engine.errors import OptionError
from epicycle.transport.config import EngineConfig

HOPPER = AttentionFacts(
    capability=(9, 0),
    dtype="bfloat16",
    head_dim=128,
    page_tokens=16,
    page_bytes=12 << 20,
    poison=False,
    installed=frozenset({"fa2", "fa3", "fa4"}),
)


def card(major: int, *installed: str) -> AttentionFacts:
    return replace(HOPPER, capability=(major, 0), installed=frozenset(installed))


@pytest.mark.parametrize(
    ("wanted", "facts", "decode", "prompt"),
    [
        ("auto", HOPPER, "triton", "triton"),
        ("auto", card(12), "triton", "triton"),
        ("triton", HOPPER, "triton", "triton"),
        ("fa3", HOPPER, "fa3", "fa3"),
        ("fa4", HOPPER, "triton", "fa4"),
        ("flash_attn", card(9, "fa3", "fa4"), "fa3", "fa3"),
        ("flash_attn", card(9, "fa4"), "triton", "fa4"),
        ("flash_attn", card(10, "fa4"), "fa4", "fa4"),
        ("flash_attn", replace(card(8, "fa2"), page_tokens=256), "fa2", "fa2"),
    ],
)
def test_backends_by_name_card_and_what_is_installed(
    wanted: str, facts: AttentionFacts, decode: str, prompt: str
) -> None:
    choice = choose_attention(wanted, facts)
    assert (decode, prompt) == (choice.decode, choice.prompt)
    assert choice.reason


@pytest.mark.parametrize(
    ("wanted", "facts", "expected"),
    [
        ("fa3", card(9), "'fa3', but fa3 isn't installed: .* flash_attn_interface; install flash-attn-3 or use triton"),
        ("flash_attn", card(9), "'flash_attn', but fa3 isn't installed"),
        ("fa3", card(8, "fa3"), "fa3 has no kernels for SM80; use triton or flash_attn"),
        ("fa4", card(12, "fa4"), "fa4 refuses page tables on SM120; use triton"),
        ("flash_attn", card(12, "fa4"), "FlashAttention refuses page tables on SM120; use triton"),
        ("flash_attn", card(7, "fa2"), "no FlashAttention serves SM70; use triton"),
        ("fa2", card(8, "fa2"), "multiple of 256 positions and page_tokens is 16; use triton; .* 0.19 GiB each"),
        ("fa3", replace(HOPPER, dtype="float32"), "fa3 computes no float32; set dtype to bfloat16"),
        ("fa3", replace(HOPPER, head_dim=80), "heads are 80 wide, not one of 64, 96, 128; use triton"),
        ("fa3", replace(HOPPER, poison=True), "NaN stays NaN; set poison to false or use triton"),
    ],
)
def test_what_cannot_be_had_is_refused_with_advice(wanted: str, facts: AttentionFacts, expected: str) -> None:
    with pytest.raises(OptionError, match=expected):
        choose_attention(wanted, facts)


def test_the_line_tells_choice_and_reason() -> None:
    told = choose_attention("flash_attn", card(9, "fa4")).line()
    assert told.startswith("attention: triton decode, fa4 prompts (flash_attn on SM90, where fa3 isn't installed")
    assert "fa2, fa3, fa4 installed, used by name only" in choose_attention("auto", HOPPER).line()


@pytest.mark.parametrize(
    ("capability", "driver", "expected"),
    [
        ((9, 0), (12, 3), ""),
        ((10, 0), (13, 0), ""),
        ((8, 9), (13, 0), "a card of capability 8.9, and that takes 9.0"),
        ((9, 0), (12, 2), "a driver for CUDA 12.2, and that takes 12.3 in a graph"),
        ((9, 0), (0, 0), "a driver for CUDA 0.0, and that takes 12.3 in a graph"),
    ],
)
def test_launches_start_early_where_card_and_driver_can(
    capability: tuple[int, int], driver: tuple[int, int], expected: str
) -> None:
    assert expected == why_late(capability, driver)


def test_the_driver_counts_in_thousands_and_tens() -> None:
    assert [(12, 3), (12, 20), (13, 0)] == [version_of(number) for number in (12030, 12200, 13000)]


def test_the_line_tells_why_launches_wait() -> None:
    late = why_late((9, 0), (12, 2))
    for wanted in ("auto", "triton", "fa4"):
        told = choose_attention(wanted, replace(HOPPER, late=late)).line()
        assert told.endswith("; a lone row's launches wait for one another: " + late + ")")
        assert "wait" not in choose_attention(wanted, HOPPER).line()
    assert "wait" not in choose_attention("fa3", replace(HOPPER, late=late)).line()


def test_an_engine_on_a_cpu_tells_its_choice_and_refuses_others() -> None:
    said: list[str] = []
    engine = Engine.load(EngineConfig(slots=2, context_tokens=32, device="cpu"), said.append)
    assert AttentionChoice("plain", "plain", "a CPU") == engine.attention
    assert "attention: plain (a CPU)" in said
    assert "attention: plain (a CPU)" == engine.capabilities().attention
    with pytest.raises(OptionError, match="attention is 'fa3', but a CPU computes attention by plain torch; use auto"):
        Engine.load(EngineConfig(attention="fa3", device="cpu"))
