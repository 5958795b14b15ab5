"""A server that replays recorded exit depths: from its trace file by id, or from the request itself."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.e2e.live.calls import Calls
from tests.e2e.live.server import LiveServer, live_server

RECORDED = [4, 1, 2, 3, 4, 1, 1, 2]
STORY = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(first_topology: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    trace: Path = tmp_path_factory.mktemp("trace") / "trace.json"
    trace.write_text(json.dumps({"walk": RECORDED, "deep": [4, 4, 9]}))
    with live_server(first_topology, "--exit-rule", "trace", "--trace-file", str(trace), "--slots", "8") as server:
        yield server


@pytest.fixture
async def served(server: LiveServer) -> AsyncIterator[Calls]:
    async with Calls(server.base_url) as calls:
        yield calls


async def test_a_recorded_trace_is_followed_exactly(served: Calls) -> None:
    whole = await served.complete(**STORY, trace_id="walk", max_tokens=len(RECORDED))
    part = await served.complete(**STORY, trace_id="walk", max_tokens=5, stream=True)

    assert RECORDED == whole.choice.exit_depths
    assert RECORDED[:5] == part.choice.exit_depths
    assert whole.choice.token_ids[:5] == part.choice.token_ids


async def test_an_inline_trace_is_followed_exactly_by_every_choice(served: Calls) -> None:
    depths = [4, 2, 1, 4, 3, 1]
    answer = await served.complete(
        prompt="Once upon a time", temperature=1.0, seed=3, n=2, exit_trace=depths, max_tokens=6, ignore_eos=True
    )

    assert [depths, depths] == [choice.exit_depths for choice in answer.choices]


async def test_a_trace_decides_what_loops_are_run_and_not_the_threshold(served: Calls) -> None:
    deep = await served.complete(**STORY, exit_trace=[4] * 6, max_tokens=6, logprobs=0)
    plain = await served.complete(**STORY, max_tokens=6, logprobs=0)

    assert [4] * 6 == plain.choice.exit_depths
    assert plain.choice == deep.choice


async def test_the_default_length_is_the_traces(served: Calls) -> None:
    assert RECORDED == (await served.complete(**STORY, trace_id="walk")).choice.exit_depths


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        ({"trace_id": "unknown"}, "trace_id", "server.trace_file"),
        ({"trace_id": "walk", "max_tokens": 9}, "trace_id", "lists 8 depths"),
        ({"trace_id": "deep", "max_tokens": 3}, "trace_id", "trace_id[2] is 9"),
        ({"trace_id": "walk", "exit_trace": [4]}, "trace_id", "exclude"),
        ({"exit_trace": [3, 1], "max_tokens": 2}, "exit_trace", "exit_trace[0] is 3, must be 4"),
        ({"exit_trace": [4, 0], "max_tokens": 2}, "exit_trace", "exit_trace[1] is 0"),
        ({"exit_trace": [4, 3], "max_tokens": 2, "max_loops": 2}, "exit_trace", "max_loops 2"),
        ({"exit_threshold": 0.5, "max_tokens": 2}, "exit_threshold", "engine.exit_rule"),
    ],
)
async def test_a_trace_that_cannot_be_followed_is_refused(
    served: Calls, body: dict[str, object], param: str, part: str
) -> None:
    answer = await served.complete(**STORY, **body)

    assert (400, param) == (answer.status, answer.error.get("param"))
    assert part in answer.error["message"]
