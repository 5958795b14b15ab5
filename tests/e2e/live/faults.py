"""A device that fails in the middle of a tick, and what the server must do then. For CPU and GPU tests alike."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.e2e.live.calls import Answer, Calls
from tests.e2e.live.server import live_server

SCRIPT = Path(__file__).parents[2] / "fakes" / "device_fault"
TICK = 60  # the canary and the first answer take fewer
STREAMS = 4
RESTART_S = 90.0


async def check_a_failed_tick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    """Every request of the epoch ends once and says why, the executor comes back, and the port was never closed."""
    monkeypatch.setenv("EPICYCLE_TEST_FAULT", f"{TICK}:{tmp_path / 'broken'}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(SCRIPT), os.environ.get("PYTHONPATH")))))
    with live_server("processes", *flags) as live:
        async with Calls(live.base_url) as calls:
            gateway = live.pids()["gw0"]
            ask = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "exit_threshold": 1.0}
            streams = [calls.start(**ask, temperature=0) for _ in range(STREAMS)]
            answers = await asyncio.gather(*(stream.task for stream in streams))
            assert (tmp_path / "broken").exists()
            for answer in answers:
                assert "engine_lost" == answer.error["code"]
                assert (200, 1) == (answer.status, answer.terminals) or 503 == answer.status

            async def served() -> Answer | None:
                answer = await calls.complete(prompt="Once upon a time", max_tokens=6, temperature=0)
                return answer if answer.status == 200 else None

            again = await live.until_async(served, "service after the fault", RESTART_S)
            assert 6 == len(again.choice.token_ids)
            assert gateway == live.pids()["gw0"]
            log = (live.scratch / "serve.log").read_text()
            assert "device_failed" in log and "device-side assert" in log
