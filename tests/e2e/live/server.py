"""A real server under test: its metrics and health, and waiting for what they should say.

Waiting polls a condition with a generous deadline; what never comes fails with the end of the server's log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from prometheus_client.parser import text_string_to_metric_families

from epicycle.actors.gateway.probes import METRICS_MAX_AGE_S
from epicycle.tools.local_server import local_server

DEADLINE_S = 60.0
POLL_S = 0.05
LOG_CHARS = 4000
T = TypeVar("T")


class Metrics(dict[str, float]):
    """Samples by `name{label="value"}`, labels in the order of the page."""

    def total(self, name: str) -> float:
        """The sample of that name, labels included, or the sum over all labels of a bare one."""
        return self[name] if name in self else sum(value for key, value in self.items() if key.split("{")[0] == name)


@dataclass(frozen=True)
class LiveServer:
    """`scratch` holds the log, `run_dir` is what --run-dir of the commands takes."""

    port: int
    run_dir: Path
    scratch: Path

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log_tail(self) -> str:
        return (self.scratch / "serve.log").read_text(errors="replace")[-LOG_CHARS:]

    def metrics(self) -> Metrics:
        with urllib.request.urlopen(f"{self.base_url}/metrics", timeout=DEADLINE_S) as reply:
            return parse_metrics(reply.read().decode())

    async def settled(self) -> Metrics:
        """The metrics once nothing is in flight and control has accounted for everything before this call.

        Control's numbers come with its heartbeat, all of one moment. A beat made after this call, with no request
        running or waiting, includes whatever ended before it.
        """
        start_s = time.monotonic()

        def idle() -> Metrics | None:
            asked_s = time.monotonic()
            metrics = self.metrics()
            beat_s = asked_s - METRICS_MAX_AGE_S - metrics['epicycle_heartbeat_age_seconds{actor="control"}']
            busy = ("requests_running", "requests_waiting", "gateway_in_flight", "gateway_unsent_cancels")
            is_idle = not any(metrics.total(f"epicycle_{name}") for name in busy)
            return metrics if is_idle and beat_s > start_s else None

        return await self.until(idle, "an idle server")

    async def until(self, condition: Callable[[], T | None], what: str, timeout_s: float = DEADLINE_S) -> T:
        """Poll on a thread until `condition` returns something true."""

        async def asked() -> T | None:
            return await asyncio.to_thread(condition)

        return await self.until_async(asked, what, timeout_s)

    async def until_async(
        self, condition: Callable[[], Awaitable[T | None]], what: str, timeout_s: float = DEADLINE_S
    ) -> T:
        deadline_s = time.monotonic() + timeout_s
        while not (found := await condition()):
            assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s} s; log:\n{self.log_tail()}"
            await asyncio.sleep(POLL_S)
        return found

    def assert_clean(self) -> None:
        """Once idle, every page is free or cached, and no count of the pool was uneven."""

        deadline_s = time.monotonic() + DEADLINE_S
        while not self._is_clean():
            assert time.monotonic() < deadline_s, f"no clean census within {DEADLINE_S} s: {self._held()}"
            time.sleep(POLL_S)

    def _is_clean(self) -> bool:
        return not any(self._held().values())

    def _held(self) -> dict[str, float]:
        metrics = self.metrics()
        names = ["requests_running", "requests_waiting", "uneven_census_total", 'host_pages{state="saved"}']
        names += [f'kv_pages{{state="{state}"}}' for state in ("live", "leased", "snapshotting")]
        return {name: metrics.total(f"epicycle_{name}") for name in names}

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`epicycle WORDS --run-dir ...`, to its end."""
        whole = [sys.executable, "-m", "epicycle", *words, "--run-dir", str(self.run_dir)]
        return subprocess.run(whole, capture_output=True, text=True, timeout=DEADLINE_S, check=False)

    def health(self) -> dict[str, object]:
        """What `epicycle health --json` prints."""
        return json.loads(self.command("health", "--json").stdout)

    def pids(self) -> dict[str, int]:
        return json.loads((self.run_dir / "instance.json").read_text())["pids"]


def parse_metrics(page: str) -> Metrics:
    samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    return Metrics((_key(sample.name, sample.labels), sample.value) for sample in samples)


def _key(name: str, labels: dict[str, str]) -> str:
    inner = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{inner}}}" if inner else name


@contextlib.contextmanager
def live_server(topology: str, *flags: str) -> Iterator[LiveServer]:
    """A ready server until the block ends; its orderly end is part of what is tested."""
    alone = ("--single-process",) if topology == "single-process" else ()
    with tempfile.TemporaryDirectory(prefix="ep", dir="/tmp") as folder:
        scratch = Path(folder)
        with local_server(scratch, [*flags, *alone]) as server:
            live = LiveServer(server.port, server.run_dir, scratch)
            yield live
            live.assert_clean()
        assert '"exit_code": 0, "event": "stopped"' in live.log_tail(), live.log_tail()
