"""A device that fails in a tick, on a CPU: torch's error is raised where a GPU's would be (that is in tests/gpu)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.live.faults import check_a_failed_tick


@pytest.mark.timeout(240)
async def test_a_failed_tick_ends_its_requests_and_the_executor_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_topology: str
) -> None:
    if first_topology == "single-process":
        pytest.skip("there is no process to lose")
    await check_a_failed_tick(tmp_path, monkeypatch, "--slots", "8", "--set", "engine.tick=device")
