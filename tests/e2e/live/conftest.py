"""The server the live suite talks to: the real engine on an embedded model, one start for each topology.

`live` is shared by all tests of a topology and parametrised by --topology. Whoever uses it leaves it idle. Modules that
need other flags start servers of their own in the first topology asked for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.conftest import TOPOLOGIES
from tests.e2e.live.calls import Calls
from tests.e2e.live.server import LiveServer, live_server

SLOTS = 32
PROMPT_CHUNK = 64


def topologies(config: pytest.Config) -> tuple[str, ...]:
    asked = config.getoption("--topology")
    return TOPOLOGIES if asked == "both" else (asked,)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "topology" in metafunc.fixturenames:
        metafunc.parametrize("topology", topologies(metafunc.config), scope="session", indirect=True)


@pytest.fixture(scope="session")
def topology(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def live(topology: str) -> Iterator[LiveServer]:
    poison = ("--poison",) if topology == "single-process" else ()  # the same tests with freed pages full of NaN
    with live_server(topology, "--slots", str(SLOTS), "--prompt-chunk", str(PROMPT_CHUNK), *poison) as server:
        yield server


@pytest.fixture(scope="session")
def first_topology(request: pytest.FixtureRequest) -> str:
    return topologies(request.config)[0]


@pytest.fixture
async def calls(live: LiveServer) -> AsyncIterator[Calls]:
    async with Calls(live.base_url) as calls:
        yield calls
