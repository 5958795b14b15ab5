"""Merging of unsent tokens: what the gateway finally reads is what it would have read at once."""

from __future__ import annotations

from typing import Any

from epicycle.actors.token_outbox import ROW_TOKENS, TokenOutbox, TokenOutboxes
from epicycle.transport.wire.columns import F32, I32, U16, U64, pack, unpack_list
from epicycle.transport.wire.output import Fin, ToGateway, TokenBatch
from tests.fakes.fabric import FakeFabric


def batch(rid: int, first: int, tokens: list[int], k: int = -1) -> TokenBatch:
    count = len(tokens)
    scores = [float(token) for token in tokens] if k >= 0 else []
    tops = [token + rank for token in tokens for rank in range(max(0, k))]
    return TokenBatch(
        epoch=1,
        rids=pack(U64, [rid]),
        first_index=pack(I32, [first]),
        counts=pack(I32, [count]),
        tokens=pack(I32, tokens),
        exit_depths=pack(U16, [4] * count),
        logprob_k=pack(I32, [k]) if k >= 0 else b"",
        logprobs=pack(F32, scores),
        top_ids=pack(I32, tops),
        top_logprobs=pack(F32, [float(top) for top in tops]),
    )


def test_messages_pass_untouched_while_the_gateway_keeps_up() -> None:
    fabric = FakeFabric()
    receiver = fabric.bind("gw0", 1, "tokens", ToGateway)
    outbox = TokenOutbox()
    outbox.connect(fabric.connect(receiver.address))
    sent = [batch(7, 0, [1]), batch(7, 1, [2]), Fin(1, 7, "stop", 2)]
    outbox.push(sent)
    assert sent == receiver.drain()
    assert (0, 0) == (len(outbox), outbox.merged_rows)


def test_rows_merge_and_fins_come_last() -> None:
    fabric = FakeFabric()
    receiver = fabric.bind("gw0", 1, "tokens", ToGateway)
    outbox = TokenOutbox()
    outbox.push([batch(7, 3, [1, 2], k=2), Fin(1, 9, "length", 0)])
    outbox.push([batch(8, 0, [5]), batch(7, 5, [3], k=2), Fin(1, 7, "stop", 6)])
    outbox.connect(fabric.connect(receiver.address))
    [merged, *fins] = receiver.drain()
    assert [Fin(1, 9, "length", 0), Fin(1, 7, "stop", 6)] == fins
    assert isinstance(merged, TokenBatch)
    assert ([7, 8], [3, 0], [3, 1]) == (
        unpack_list(U64, merged.rids),
        unpack_list(I32, merged.first_index),
        unpack_list(I32, merged.counts),
    )
    assert ([1, 2, 3, 5], [2, -1]) == (unpack_list(I32, merged.tokens), unpack_list(I32, merged.logprob_k))
    assert [1, 2, 2, 3, 3, 4] == unpack_list(I32, merged.top_ids)
    assert [1, 2, 3] == unpack_list(F32, merged.logprobs)


def test_very_long_row_travels_in_pieces_that_follow_one_another() -> None:
    fabric = FakeFabric()
    receiver = fabric.bind("gw0", 1, "tokens", ToGateway)
    outbox = TokenOutbox()
    outbox.push([batch(7, 0, list(range(ROW_TOKENS + 5)), k=1)])
    outbox.connect(fabric.connect(receiver.address))
    pieces: list[Any] = receiver.drain()
    assert [0, ROW_TOKENS] == [unpack_list(I32, piece.first_index)[0] for piece in pieces]
    assert list(range(ROW_TOKENS + 5)) == [t for piece in pieces for t in unpack_list(I32, piece.top_ids)]
    assert 0 == len(outbox)


def test_dead_gateway_gets_nothing_until_it_is_back() -> None:
    fabric = FakeFabric()
    receiver = fabric.bind("gw0", 2, "tokens", ToGateway)
    outboxes = TokenOutboxes()
    outboxes.push(0, [batch(7, 0, [1])])
    assert 1 == len(outboxes)
    outboxes.drop(0)
    outboxes.push(0, [batch(7, 1, [2])])
    assert 0 == len(outboxes)
    outboxes.connect(0, fabric.connect(receiver.address))
    outboxes.push(0, [batch(8, 0, [3])])
    assert [batch(8, 0, [3])] == receiver.drain()
