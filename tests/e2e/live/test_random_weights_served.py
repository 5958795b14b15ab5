"""A server on a config file alone: random weights and no tokenizer, so ids go in and ids come out."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from epicycle.engine.models.locate import locate
from tests.e2e.live.calls import Calls
from tests.e2e.live.server import LiveServer, live_server

IDS = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def server(first_topology: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = tmp_path_factory.mktemp("model") / "bare-ouro"
    folder.mkdir()
    shutil.copy(locate("embedded:ouro", "random").folder / "config.json", folder)
    with live_server(first_topology, "--model", str(folder), "--weights", "random", "--slots", "4") as server:
        yield server


@pytest.fixture
async def served(server: LiveServer) -> AsyncIterator[Calls]:
    async with Calls(server.base_url) as calls:
        yield calls


async def test_ids_go_in_and_ids_come_out_without_text(served: Calls) -> None:
    asked = {"prompt": IDS, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    whole = await served.complete(**asked)
    streamed = await served.complete(**asked, stream=True)

    assert ("", "length", IDS) == (whole.choice.text, whole.choice.finish_reason, whole.choice.prompt_token_ids)
    assert 6 == len(whole.choice.token_ids) == len(whole.choice.exit_depths)
    assert whole.choice == streamed.choice
    assert {"prompt_tokens": 5, "completion_tokens": 6} == {
        name: whole.usage[name] for name in ("prompt_tokens", "completion_tokens")
    }
    assert "bare-ouro" == (await served.get("/v1/models"))["data"][0]["id"]


async def test_logprobs_have_numbers_and_no_texts(served: Calls) -> None:
    answer = await served.complete(prompt=IDS, max_tokens=3, temperature=0, logprobs=2, ignore_eos=True)

    assert 3 == len(answer.choice.logprobs)
    assert all(value is not None and value < 0 for value in answer.choice.logprobs)


@pytest.mark.parametrize(
    ("body", "param"), [({"prompt": "some text"}, "prompt"), ({"prompt": IDS, "stop": ["x"]}, "stop")]
)
async def test_text_is_refused(served: Calls, body: dict[str, object], param: str) -> None:
    answer = await served.complete(**body)

    assert (400, param) == (answer.status, answer.error["param"])
    assert "tokenizer.json" in answer.error["message"]


async def test_chats_and_the_tokenizer_routes_are_refused(served: Calls) -> None:
    chat = await served.chat("hello")
    async with served.session.post("/tokenize", json={"prompt": "hello"}) as reply:
        tokenize = json.loads(await reply.read())

    assert (400, "messages") == (chat.status, chat.error["param"])
    assert "invalid_request_error" == tokenize["error"]["code"]
