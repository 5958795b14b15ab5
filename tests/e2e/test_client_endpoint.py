"""The embeddable client's endpoint says what HTTP says, through the same path."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epicycle.transport.dealer import Dealer
from epicycle.transport.wire.client import Abort, Done, Event, Failed, Generate, ToClient
from epicycle.transport.wire.columns import I32, U16, unpack_list
from tests.e2e.client import HELLO, Client
from tests.fakes.stack import MOCK, UNLIMITED, Stack, until


@pytest.fixture
async def reachable(short_dir: Path) -> AsyncIterator[Stack]:
    async with Stack(msgspec.structs.replace(MOCK, run_dir=str(short_dir))) as stack:
        yield stack


class Caller:
    """A DEALER that writes down what it hears."""

    def __init__(self, stack: Stack) -> None:
        address = next(end.address for end in stack.gateway_host.endpoints if end.link == "client")
        self.heard: list[ToClient] = []
        self.dealer = Dealer(address, ToClient, on_message=self.heard.append, on_lost=lambda: None)

    async def ask(self, ref: int, kind: str, **fields: Any) -> list[ToClient]:
        assert await self.dealer.wait_connected(5)
        self.dealer.send(Generate(ref, kind, msgspec.json.encode(fields)))
        await until(lambda: any(isinstance(message, Done | Failed) for message in self.heard))
        return self.heard


@pytest.mark.parametrize("kind", ["completions", "chat"])
async def test_events_add_up_to_the_http_answer(reachable: Stack, kind: str) -> None:
    fields: dict[str, Any] = {"messages": HELLO} if kind == "chat" else {"prompt": "hello"}
    async with Client(reachable.base_url) as client:
        post = client.chat if kind == "chat" else client.complete
        whole = (await post(max_tokens=5, return_token_ids=True)).json
    caller = Caller(reachable)
    *events, done = await caller.ask(7, kind, **fields, max_tokens=5)
    assert isinstance(done, Done)
    assert whole["usage"] == msgspec.json.decode(done.usage)
    tokens = [event for event in events if isinstance(event, Event)]
    choice = whole["choices"][0]
    assert choice["token_ids"] == [token for event in tokens for token in unpack_list(I32, event.token_ids)]
    assert choice["exit_depths"] == [depth for event in tokens for depth in unpack_list(U16, event.exit_depths)]
    text = choice["message"]["content"] if kind == "chat" else choice["text"]
    assert text == "".join(event.text for event in tokens)
    assert choice["prompt_token_ids"] == unpack_list(I32, tokens[0].prompt_ids)
    assert "length" == tokens[-1].finish_reason
    caller.dealer.close()


async def test_refusals_carry_the_http_error(reachable: Stack) -> None:
    caller = Caller(reachable)
    (failed,) = await caller.ask(1, "completions", prompt="a", top_p=2)
    assert isinstance(failed, Failed)
    assert (1, 400, "invalid_request_error", "top_p") == (failed.ref, failed.status, failed.code, failed.param)
    caller.dealer.close()


@pytest.mark.parametrize("leaves", [False, True])
async def test_abort_and_departure_free_everything(reachable: Stack, leaves: bool) -> None:
    caller = Caller(reachable)
    reachable.allow(6)
    assert await caller.dealer.wait_connected(5)
    caller.dealer.send(Generate(1, "completions", b'{"prompt": "a", "max_tokens": 900, "ignore_eos": true}'))
    await reachable.until_resident(1)
    await until(lambda: reachable.ticks_left == 0)
    if leaves:
        caller.dealer.close()  # seen at the next event for it
    else:
        caller.dealer.send(Abort(1))
        await until(lambda: len(reachable.gateway.core.table) == 0)
    reachable.allow(UNLIMITED)
    await until(lambda: len(reachable.gateway.core.table) == 0 and reachable.resident == 0)
    await asyncio.sleep(0)
    caller.dealer.close()
