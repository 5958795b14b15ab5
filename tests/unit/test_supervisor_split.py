"""Executors that can't exchange KV stop the server when they are ready, and not when the first prompt fails."""

from __future__ import annotations

import msgspec

from epicycle.actors.mock_model import mock_capabilities
from epicycle.actors.supervisor import Supervisor
from epicycle.transport.config import Config, SupervisorConfig
from epicycle.transport.wire.control import Ready
from epicycle.transport.wire.transfer import TransferFacts

KINDS = {"ex0": "prefill", "ex1": "decode", "control": "control"}


def supervisor() -> Supervisor:
    made = Supervisor(SupervisorConfig(), KINDS, lambda: None, lambda peers: None)
    for name in KINDS:
        made.peers.start(name, 0.0)
    return made


def ready(name: str, epoch: int, **facts: str) -> Ready:
    transfer = TransferFacts(**(dict.fromkeys(TransferFacts.__struct_fields__, "same") | facts))
    return Ready(name, epoch, [], msgspec.structs.replace(mock_capabilities(Config()), transfer=transfer))


async def test_equal_executors_serve() -> None:
    made = supervisor()
    for name, epoch in (("ex0", 1), ("ex1", 2)):
        made.hear(ready(name, epoch), lambda message: None)
    assert (0, "") == (made.exit_code, made.cause)


async def test_a_difference_stops_the_server_with_both_values() -> None:
    made = supervisor()
    made.hear(ready("ex0", 1, weights_checksum="aa", torch="2.13.0"), lambda message: None)
    made.hear(ready("ex1", 2, weights_checksum="bb", torch="2.13.0"), lambda message: None)
    assert 1 == made.exit_code
    assert "split_mismatch: ex1 and ex0 can't exchange KV: weights_checksum is 'bb' here and 'aa' there" in made.cause


async def test_an_executor_that_has_no_connector_stops_the_server() -> None:
    made = supervisor()
    made.hear(Ready("ex0", 1, [], mock_capabilities(Config())), lambda message: None)
    assert "ex0 is to prefill, but its executor can't exchange KV" in made.cause
