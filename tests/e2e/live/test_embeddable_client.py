"""epicycle.Client and AsyncClient in a process without torch and aiohttp: the same results as over HTTP."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.live.calls import Calls, Choice
from tests.e2e.live.client_probe import STORY
from tests.e2e.live.server import DEADLINE_S, LiveServer

PROBE = Path(__file__).with_name("client_probe.py")


def probe(run_dir: Path) -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, str(PROBE), str(run_dir)], capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False
    )
    assert (0, "") == (ended.returncode, ended.stderr)
    return json.loads(ended.stdout)


def check_choice(expected: Choice, told: dict[str, Any]) -> None:
    logprobs = [value for part in told["logprobs"] for value in part["token_logprobs"]]
    assert expected.text == told["text"]
    assert expected.token_ids == told["token_ids"]
    assert expected.exit_depths == told["exit_depths"]
    assert expected.finish_reason == told["finish_reason"]
    assert expected.prompt_token_ids == told["prompt_token_ids"]
    assert expected.logprobs == logprobs


async def test_both_clients_get_what_http_gets(live: LiveServer, calls: Calls) -> None:
    text = await calls.complete(prompt="Once upon a time", **STORY)
    ids = await calls.complete(prompt=[906, 1035, 260, 507], n=2, **STORY)
    chat = await calls.chat("What is 2 plus 3?", max_tokens=20, temperature=0)
    before = await live.settled()
    told = await asyncio.to_thread(probe, live.run_dir)
    after = await live.settled()

    for side in ("sync", "async"):
        check_choice(text.choice, told[side]["text"]["choices"][0])
        assert text.usage == told[side]["text"]["usage"]
        check_choice(chat.choice, told[side]["chat"]["choices"][0])
        assert text.choice.text == "".join(event["text"] for event in told[side]["stream"])
        assert text.choice.token_ids == [token for event in told[side]["stream"] for token in event["token_ids"]]
        assert text.choice.exit_depths == [depth for event in told[side]["stream"] for depth in event["exit_depths"]]
    for expected, choice in zip(ids.choices, told["sync"]["ids"]["choices"], strict=True):
        check_choice(expected, choice)
    assert chat.choice.text == told["sync"]["stream_chat"]

    cancelled = told["sync"]["cancelled"]["choices"][0]
    assert "cancelled" == cancelled["finish_reason"]
    assert 2 <= len(cancelled["token_ids"]) < 900
    assert 0 == after['epicycle_kv_pages{state="live"}']
    assert 900 > after["epicycle_generation_tokens_total"] - before["epicycle_generation_tokens_total"]
    assert ["context_length_exceeded", 400] == told["sync"]["refused"]
    assert "healthy" == told["sync"]["status"]
    assert {"ex0", "control", "gw0"} <= set(told["sync"]["deep"])
