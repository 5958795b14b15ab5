"""`epicycle plan`: sizes as text, the plan of known models, and refusals that say what would help."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from epicycle.tools import plan

GIB = 1 << 30


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert 0 == plan.main([*words, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1000000", 1_000_000),
        ("512MiB", 512 << 20),
        ("120GiB", 120 * GIB),
        ("1.5G", 3 * GIB // 2),
        ("2kb", 2048),
        ("1T", 1 << 40),
        ("64b", 64),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, expected: int) -> None:
    assert expected == plan.parse_bytes(text)


@pytest.mark.parametrize("text", ["", "GiB", "12X", "1e999", "nan", "many"])
def test_what_is_no_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="512MiB"):
        plan.parse_bytes(text)


def test_ouro_costs_a_plane_for_each_loop(capsys: pytest.CaptureFixture[str]) -> None:
    told = planned(capsys, "--model", "ouro-1.4b", "--memory", "100GiB", "--slots", "4", "--context", "4096")

    # 2 (K and V) x 24 layers x 4 loops x 16 heads x 128 x 2 bytes
    assert 786_432 == told["layout"]["bytes_per_token"]
    assert (4, 96) == (told["layout"]["planes"], told["layout"]["slots_per_page"])
    assert (4096, 4, 4) == (told["context_tokens"], told["slots"], told["windows"])
    assert told["total_pages"] * told["page_bytes"] == told["pool_bytes"]
    assert told["pool_bytes"] <= told["room_bytes"] == 100 * GIB


def test_huginn_pages_hold_recurrent_layers_only_behind_the_first_plane(capsys: pytest.CaptureFixture[str]) -> None:
    exact = planned(capsys, "--model", "huginn-0125", "--memory", "100GiB")
    twin = planned(capsys, "--model", "huginn-0125", "--memory", "100GiB", "--rectangular")

    assert (132, 2_787_840) == (exact["layout"]["slots_per_page"], exact["layout"]["bytes_per_token"])
    assert (256, 5_406_720) == (twin["layout"]["slots_per_page"], twin["layout"]["bytes_per_token"])


@pytest.mark.parametrize(("layout", "planes"), [("shared", 1), ("budgeted:2", 2), ("last_exited", 4)])
def test_the_layout_decides_how_many_planes_a_token_costs(
    capsys: pytest.CaptureFixture[str], layout: str, planes: int
) -> None:
    told = planned(capsys, "--model", "ouro-1.4b", "--kv-layout", layout)

    assert planes == told["layout"]["planes"]
    assert 786_432 // 4 * planes == told["layout"]["bytes_per_token"]


def test_the_element_type_scales_the_pool(capsys: pytest.CaptureFixture[str]) -> None:
    half, full = (planned(capsys, "--dtype", dtype) for dtype in ("bfloat16", "float32"))

    assert 2 * half["page_bytes"] == full["page_bytes"]


def test_automatic_context_is_what_the_memory_funds(capsys: pytest.CaptureFixture[str]) -> None:
    told = planned(capsys, "--model", "ouro-1.4b", "--memory", "10GiB", "--slots", "2")

    assert 0 < told["context_tokens"] < 65_536
    assert told["window_bytes"] <= 10 * GIB
    assert told["window_bytes"] + told["page_bytes"] > told["left_bytes"]


def test_people_get_the_same_terms_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    told = planned(capsys)
    assert 0 == plan.main([])
    lines = capsys.readouterr().out.splitlines()

    assert "embedded:ouro: 4 loops, 6 KV layers of which 6 recur" == lines[0]
    assert "last_exited, slot-exact: 4 planes, 24 slots a page, 24,576 bytes a token" == lines[1]
    assert f"{told['total_pages']:,} pages of 16 tokens" in lines[2]
    assert f"the pool holds {told['total_pages'] * 16:,} tokens" == lines[3]


def test_what_if_rows_change_one_thing_each(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "ouro-1.4b", "--memory", "60GiB", "--slots", "2", "--context", "65536")
    assert 0 == plan.main([*words])
    text = capsys.readouterr().out
    rows = {line[2:30].strip(): line[30:].strip() for line in text[text.index("what if:") :].splitlines()[1:]}
    assert ["--slots 4", "--context 32768", "--memory 120GiB", "--kv-layout shared", "--rectangular"] == list(rows)
    doubled = planned(capsys, *words, "--memory", "120GiB")
    tokens = doubled["total_pages"] * 16
    assert (
        f"{tokens:,} tokens; 2 slots x 65,536 of context, {doubled['windows']} whole windows" == rows["--memory 120GiB"]
    )


def test_a_what_if_that_is_refused_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == plan.main(["--model", "huginn-0125", "--memory", "12GiB", "--slots", "1", "--context", "4096"])
    text = capsys.readouterr().out
    assert "--rectangular                refused: 1 slots of 4,096 tokens need one window of" in text


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--memory", "1MiB"], "raise kv_memory_bytes"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--kv-layout", "budgeted:9"], "budgeted:9"),
    ],
)
def test_what_cannot_be_planned_is_refused(capsys: pytest.CaptureFixture[str], words: list[str], part: str) -> None:
    assert 1 == plan.main(words)
    told = capsys.readouterr()

    assert "" == told.out
    assert told.err.startswith("epicycle plan: ")
    assert part in told.err
