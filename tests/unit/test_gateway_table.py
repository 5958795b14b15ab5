"""The table arbitrates: the first terminal wins, repeated and late messages drop, everything lost is ended once."""

from __future__ import annotations

import pytest

from epicycle.actors.gateway.errors import ApiError
from epicycle.actors.gateway.generation import Generation
from epicycle.actors.gateway.metrics import GatewayMetrics
from epicycle.actors.gateway.pieces import Piece, Usage
from epicycle.actors.gateway.spec import Prompt, Spec
from epicycle.actors.gateway.stops import StopSet
from epicycle.actors.gateway.table import Table
from epicycle.transport.wire.columns import F32, I32, U16, U64, pack
from epicycle.transport.wire.output import Fin, PrefixHit, PromptLogprobs, TokenBatch
from epicycle.transport.wire.request import Accepted, LoopBounds, Rejected, Sampling, Submit

EPOCH = 3
STOP = 2


class FakeLinks:
    def __init__(self) -> None:
        self.submits: list[Submit] = []
        self.cancels: list[tuple[int, str]] = []
        self.refusal: ApiError | None = None

    async def submit(self, message: Submit) -> None:
        if self.refusal is not None and self.submits:
            raise self.refusal
        self.submits.append(message)

    def cancel(self, rid: int, cause: str) -> None:
        self.cancels.append((rid, cause))


class FakeSink:
    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.ends: list[Usage | ApiError] = []
        self.accepted = 0
        self.flushes = 0

    def on_accepted(self) -> None:
        self.accepted += 1

    def on_piece(self, piece: Piece) -> None:
        assert not self.ends, "a piece after the end"
        self.pieces.append(piece)

    def on_done(self, usage: Usage) -> None:
        self.ends.append(usage)

    def on_failed(self, error: ApiError) -> None:
        self.ends.append(error)

    def flush(self) -> None:
        self.flushes += 1


def make_spec(n: int = 1, max_tokens: int = 4, logprobs: int = -1, *, echo: bool = False) -> Spec:
    return Spec(
        is_chat=False,
        model_id="m",
        prompts=[Prompt([7, 8, 9], "abc")],
        n=n,
        samplings=[Sampling(max_tokens=max_tokens, logprobs=logprobs)],
        loops=[LoopBounds()],
        stops=StopSet([]),
        stop_ids=frozenset({STOP}),
        named_stop_ids=frozenset(),
        wants_logprobs=logprobs >= 0,
        echo=echo,
        is_stream=True,
        includes_usage=False,
        returns_token_ids=True,
        skips_special_tokens=True,
        priority=0,
        noise_seed=0,
        cache_salt="",
        session_id="",
    )


class Scene:
    """One generation in a table."""

    def __init__(self, spec: Spec | None = None) -> None:
        self.table = Table(5, epoch=2)
        self.table.executors = {EPOCH: "ex0"}
        self.links, self.sink, self.metrics = FakeLinks(), FakeSink(), GatewayMetrics()
        self.generation = Generation(spec or make_spec(), self.sink, self.table, self.links, self.metrics, None)

    async def start(self) -> list[int]:
        await self.generation.start()
        return [submit.rid for submit in self.links.submits]

    def tokens(self, rid: int, first: int, *tokens: int, epoch: int = EPOCH) -> None:
        self.table.on_output([batch(rid, first, *tokens, epoch=epoch)])

    def fin(self, rid: int, reason: str = "length", tokens: int = 0) -> None:
        self.table.on_output([Fin(epoch=EPOCH, rid=rid, reason=reason, tokens=tokens)])

    @property
    def seen(self) -> list[int]:
        return [piece.token for piece in self.sink.pieces]

    @property
    def codes(self) -> list[str]:
        return [end.code if isinstance(end, ApiError) else "ok" for end in self.sink.ends]


def batch(rid: int, first: int, *tokens: int, epoch: int = EPOCH) -> TokenBatch:
    return TokenBatch(
        epoch=epoch,
        rids=pack(U64, [rid]),
        first_index=pack(I32, [first]),
        counts=pack(I32, [len(tokens)]),
        tokens=pack(I32, tokens),
        exit_depths=pack(U16, [4] * len(tokens)),
    )


async def test_rid_names_gateway_and_incarnation() -> None:
    scene = Scene()
    (rid,) = await scene.start()
    assert (5, 2, 1) == (rid >> 56, rid >> 40 & 0xFFFF, rid & 0xFF)
    assert 5 == scene.links.submits[0].gateway


async def test_end_comes_with_the_last_token() -> None:
    scene = Scene()
    (rid,) = await scene.start()
    scene.tokens(rid, 0, 10, 11)
    scene.tokens(rid, 2, 12, 13)
    assert [10, 11, 12] == scene.seen, "the limit's token waits for its Fin"
    scene.fin(rid)
    assert ([10, 11, 12, 13], "length") == (scene.seen, scene.sink.pieces[-1].finish_reason)
    assert [Usage(3, 4, 16, 0)] == scene.sink.ends
    assert 0 == len(scene.table)


async def test_repeated_tokens_drop_by_index() -> None:
    scene = Scene()
    (rid,) = await scene.start()
    scene.tokens(rid, 0, 10, 11)
    scene.tokens(rid, 0, 10, 11)
    scene.tokens(rid, 1, 11, 12)
    assert [10, 11, 12] == scene.seen
    assert 3 == scene.table.counts.repeated_tokens


async def test_gap_fails_the_request() -> None:
    scene = Scene()
    (rid,) = await scene.start()
    scene.tokens(rid, 1, 11)
    assert ["server_error"] == scene.codes
    assert [rid] == [cancelled for cancelled, _ in scene.links.cancels]


async def test_tokens_missing_at_the_end_fail_the_request() -> None:
    scene = Scene()
    (rid,) = await scene.start()
    scene.tokens(rid, 0, 10)
    scene.fin(rid, "length", tokens=2)
    assert ["server_error"] == scene.codes


async def test_messages_of_another_epoch_are_counted_and_dropped() -> None:
    scene = Scene()
    (rid,) = await scene.start()
    scene.tokens(rid, 0, 10, epoch=EPOCH - 1)
    assert ([], 1) == (scene.seen, scene.table.counts.other_epoch)


async def test_second_terminal_is_counted_only() -> None:
    scene = Scene()
    (rid,) = await scene.start()
    scene.fin(rid, "stop")
    scene.fin(rid)
    scene.table.on_verdicts([Rejected(rid, "overloaded", "")])
    assert (["ok"], 2) == (scene.codes, scene.table.counts.late_terminals)


async def test_cancelled_request_is_acknowledged_by_its_terminal() -> None:
    scene = Scene()
    (rid,) = await scene.start()
    scene.generation.close()
    assert [(rid, "client")] == scene.links.cancels
    scene.tokens(rid, 0, 10)
    scene.fin(rid, "cancelled")
    counts = scene.table.counts
    assert ([], [], 1, 0, 1) == (
        scene.seen,
        scene.codes,
        counts.acknowledged,
        counts.late_terminals,
        counts.late_tokens,
    )


async def test_one_failing_choice_ends_the_others() -> None:
    scene = Scene(make_spec(n=3))
    rids = await scene.start()
    scene.table.on_verdicts([Accepted(rids[0]), Rejected(rids[1], "context_length_exceeded", "no", "max_tokens")])
    assert ["context_length_exceeded"] == scene.codes
    assert [rids[0], rids[2]] == [rid for rid, _ in scene.links.cancels]
    assert (0, 1) == (len(scene.table), scene.sink.accepted)
    scene.fin(rids[0], "cancelled")
    assert 1 == len(scene.sink.ends)


async def test_refused_submit_cancels_those_before_it() -> None:
    scene = Scene(make_spec(n=3))
    scene.links.refusal = ApiError("overloaded", "full")
    (first,) = await scene.start()
    assert (["overloaded"], [first]) == (scene.codes, [rid for rid, _ in scene.links.cancels])
    assert 0 == len(scene.table)


async def test_everything_lost_ends_once() -> None:
    scene = Scene(make_spec(n=3))
    rids = await scene.start()
    scene.tokens(rids[0], 0, 10)
    scene.table.fail_all("engine_lost", "gone")
    assert ["engine_lost"] == scene.codes
    assert 0 == len(scene.table)


async def test_a_lost_executor_ends_what_ran_on_it_and_control_is_told() -> None:
    scene = Scene()
    (rid,) = await scene.start()
    scene.table.executors[EPOCH + 1] = "ex1"
    scene.table.on_verdicts([Accepted(rid, executor_epoch=EPOCH + 1)])
    scene.table.fail_executor(EPOCH, "engine_lost", "gone")
    assert ([], 1) == (scene.codes, len(scene.table)), "it ran elsewhere"
    scene.table.fail_executor(EPOCH + 1, "engine_lost", "gone")
    assert (["engine_lost"], 0) == (scene.codes, len(scene.table))
    assert [(rid, "client")] == scene.links.cancels
    scene.table.on_verdicts([Rejected(rid, "engine_lost", "gone")])
    assert (1, 0) == (scene.table.counts.acknowledged, scene.table.counts.late_terminals)


async def test_late_words_of_an_executor_that_gave_a_sequence_up_change_nothing() -> None:
    scene = Scene()
    (rid,) = await scene.start()
    scene.table.executors[EPOCH + 1] = "ex1"
    scene.tokens(rid, 0, 10, epoch=EPOCH + 1)
    scene.table.on_output([PrefixHit(epoch=EPOCH, rid=rid, tokens=2)])
    scene.table.on_verdicts([Accepted(rid, executor_epoch=EPOCH)])
    scene.table.fail_executor(EPOCH, "engine_lost", "gone")
    assert ([], 1) == (scene.codes, scene.table.counts.other_epoch)


async def test_tokens_say_where_a_sequence_runs() -> None:
    scene = Scene()
    (rid,) = await scene.start()
    scene.tokens(rid, 0, 10)
    scene.table.fail_executor(EPOCH, "engine_lost", "gone")
    assert ["engine_lost"] == scene.codes


@pytest.mark.parametrize(
    ("reason", "code"), [("deadline", "timeout"), ("shutdown", "draining"), ("error", "server_error")]
)
async def test_bad_ends_have_their_codes(reason: str, code: str) -> None:
    scene = Scene()
    (rid,) = await scene.start()
    scene.fin(rid, reason)
    assert [code] == scene.codes


async def test_expected_end_that_does_not_come_is_no_end() -> None:
    scene = Scene()
    (rid,) = await scene.start()
    scene.tokens(rid, 0, STOP)
    assert [] == scene.seen, "held for its Fin"
    scene.tokens(rid, 1, 11)
    assert [STOP, 11] == scene.seen, "the executor went on: not the end"


async def test_prompt_logprobs_come_once_and_in_order() -> None:
    scene = Scene(make_spec(logprobs=0, echo=True))
    (rid,) = await scene.start()
    for first in (1, 1, 2):
        scores = PromptLogprobs(epoch=EPOCH, rid=rid, first=first, k=0, logprobs=pack(F32, [-float(first)]))
        scene.table.on_output([scores])
    scene.fin(rid)
    part = scene.sink.pieces[0].part
    assert part is not None
    assert [None, -1.0, -2.0] == [score.logprob for score in part.logprobs]


async def test_minus_infinity_never_leaves_the_table() -> None:
    scene = Scene(make_spec(logprobs=1))
    (rid,) = await scene.start()
    row = batch(rid, 0, 10)
    low = pack(F32, [float("-inf")])
    row = TokenBatch(
        row.epoch, row.rids, row.first_index, row.counts, row.tokens, row.exit_depths,
        pack(I32, [1]), low, pack(I32, [10]), low,
    )  # fmt: skip
    scene.table.on_output([row])
    logprob = scene.sink.pieces[0].logprob
    assert logprob is not None
    assert (-9999.0, [(10, -9999.0)]) == (logprob.logprob, logprob.top)
