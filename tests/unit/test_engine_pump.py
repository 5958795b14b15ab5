"""What a pump does with plans: depths, refill, leases, ends, slots and faults."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from epicycle.engine.engine import Engine
from epicycle.transport.wire.columns import I32, U16, pack, unpack_list
from epicycle.transport.wire.output import POOL_WARNING
from epicycle.transport.wire.plan import Evict, Grow, Knobs, Plan
from epicycle.transport.wire.request import LoopBounds, Sampling
from tests.fakes.serving import EPOCH, Ask, Serving, floats, serve_all, serve_alone, tiny_engine, tiny_folder

GREEDY = Sampling(max_tokens=8, temperature=0.0, logprobs=2)
EARLY = LoopBounds(min_loops=1, exit_threshold=0.55)
PROMPT = [5, 9, 33, 2, 41, 17, 60]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models"), "ouro")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return tiny_engine(folder)


def asks(count: int, loops: LoopBounds = EARLY, sampling: Sampling = GREEDY) -> list[Ask]:
    return [
        Ask([(7 * number + 3 * place) % 61 for place in range(3 + number)], sampling, loops) for number in range(count)
    ]


class TestLoops:
    def test_a_row_leaves_in_the_loop_that_decides(self, engine: Engine) -> None:
        serving = Serving(engine)
        rids = [serving.submit(ask) for ask in asks(6)]
        serving.run()
        outcomes = [serving.outcomes[rid] for rid in rids]
        counters = serving.pump.counters
        assert {4} == {outcome.depths[0] for outcome in outcomes}
        assert {1, 2} & {depth for outcome in outcomes for depth in outcome.depths[1:]}
        decoded = [depth for outcome in outcomes for depth in outcome.depths[1:]]
        assert sum(decoded) == counters.decode_row_loops
        assert sum(4 - depth for depth in decoded) == counters.loops_saved
        assert 4 * sum(len(ask.prompt) for ask in asks(6)) == counters.prompt_row_loops
        assert counters.decode_row_loops + counters.prompt_row_loops == counters.rows_in_ticks
        assert sum(len(outcome.tokens) for outcome in outcomes) == counters.generated_tokens
        assert serving.reports[-1].generated_tokens == counters.generated_tokens

    def test_bounds_hold_for_generated_tokens_only(self, engine: Engine) -> None:
        deep, shallow, exact = serve_all(
            engine,
            [
                Ask(PROMPT, GREEDY, LoopBounds(min_loops=3, exit_threshold=0.0)),
                Ask(PROMPT, GREEDY, LoopBounds(max_loops=2)),
                Ask(PROMPT, GREEDY, LoopBounds(min_loops=1, max_loops=1, exit_threshold=0.5)),
            ],
        )
        assert [4] + [3] * 7 == deep.depths
        assert [4] + [2] * 7 == shallow.depths
        assert [4] + [1] * 7 == exact.depths

    def test_a_trace_prescribes_every_depth(self, folder: Path) -> None:
        listed = [4, 1, 3, 2, 4, 1, 2, 3]
        engine = tiny_engine(folder, exit_rule="trace")
        outcome = serve_all(engine, [Ask(PROMPT, GREEDY, LoopBounds(exit_trace=pack(U16, listed)))])[0]
        assert listed == outcome.depths

    def test_fewer_loops_can_be_served(self, folder: Path) -> None:
        outcome = serve_all(tiny_engine(folder, loops=3), [Ask(PROMPT, GREEDY)])[0]
        assert [3] * 8 == outcome.depths

    def test_rows_of_one_tick_are_at_different_depths(self, engine: Engine) -> None:
        serving = Serving(engine)
        for ask in asks(6):
            serving.submit(ask)
        serving.run()
        assert serving.pump.counters.mixed_depth_ticks > serving.pump.counters.ticks // 2

    def test_a_new_row_joins_at_the_next_tick(self, engine: Engine) -> None:
        serving = Serving(engine)
        serving.submit(Ask(PROMPT, Sampling(max_tokens=20, temperature=0.0)))
        for _ in range(6):
            serving.step()
        before = serving.pump.counters.rows_in_ticks
        serving.submit(Ask(PROMPT[:3], GREEDY))
        serving.step()
        assert 1 + 3 == serving.pump.counters.rows_in_ticks - before

    def test_a_chunk_costs_a_running_stream_one_loop_a_tick(self, engine: Engine) -> None:
        serving = Serving(engine)
        first = serving.submit(Ask(PROMPT, Sampling(max_tokens=30, temperature=0.0), LoopBounds(max_loops=1)))
        for _ in range(4):
            serving.step()
        serving.submit(Ask([1] * 30, GREEDY))
        for _ in range(5):
            tokens = len(serving.outcomes[first].tokens)
            serving.step()
            assert tokens + 1 == len(serving.outcomes[first].tokens)

    def test_chunks_share_the_budget(self, engine: Engine) -> None:
        serving = Serving(engine)
        for length in (12, 9, 5):
            serving.submit(Ask(list(range(length)), GREEDY))
        serving.step()
        assert 16 == serving.pump.counters.rows_in_ticks  # 12 of the first, 4 of the second
        serving.plan(knobs=Knobs(prompt_chunk_tokens=20))
        serving.step()
        assert 16 + 20 == serving.pump.counters.rows_in_ticks


class TestEnds:
    def test_limits_and_stop_ids(self, engine: Engine) -> None:
        whole = serve_all(engine, [Ask(PROMPT, GREEDY)])[0]
        assert ("length", 8) == (whole.reason, len(whole.tokens))
        stop = whole.tokens[3]
        cut = Sampling(max_tokens=8, temperature=0.0, stop_ids=pack(I32, [stop]))
        stopped = serve_all(engine, [Ask(PROMPT, cut)])[0]
        end = whole.tokens.index(stop) + 1
        assert ("stop", whole.tokens[:end]) == (stopped.reason, stopped.tokens)

    def test_min_tokens_hold_stop_ids_back(self, engine: Engine) -> None:
        whole = serve_all(engine, [Ask(PROMPT, GREEDY)])[0]
        held = Sampling(max_tokens=8, temperature=0.0, min_tokens=8, stop_ids=pack(I32, [whole.tokens[0]]))
        outcome = serve_all(engine, [Ask(PROMPT, held)])[0]
        assert 8 == len(outcome.tokens)
        assert whole.tokens[0] not in outcome.tokens

    def test_times_come_from_the_clock(self, engine: Engine) -> None:
        now = iter(range(1000))
        serving = Serving(engine, engine.new_pump(EPOCH, clock=lambda: float(next(now))))
        rid = serving.submit(Ask(PROMPT, GREEDY))
        serving.run()
        fin = serving.outcomes[rid].fin
        assert fin is not None
        assert (1.5, 1000.0, 1000.0) == (fin.queue_ms, fin.prefill_ms, fin.decode_ms)

    def test_a_prompt_can_be_scored_without_output(self, engine: Engine) -> None:
        score = Sampling(max_tokens=0, prompt_logprobs=3)
        outcome = serve_all(engine, [Ask(PROMPT, score)])[0]
        assert ("length", [], 1) == (outcome.reason, outcome.tokens, outcome.scored_from)
        assert len(PROMPT) - 1 == len(floats(outcome.prompt_logprobs))
        assert 3 * (len(PROMPT) - 1) == len(outcome.prompt_top_ids)

    def test_prompt_scores_equal_the_logprobs_of_the_same_text_when_generated(self, engine: Engine) -> None:
        generated = serve_all(engine, [Ask(PROMPT, GREEDY)])[0]
        score = Sampling(max_tokens=0, prompt_logprobs=2)
        scored = serve_all(engine, [Ask(PROMPT + generated.tokens, score)])[0]
        assert generated.top_ids == scored.prompt_top_ids[2 * (len(PROMPT) - 1) :]
        assert floats(generated.logprobs) == pytest.approx(floats(scored.prompt_logprobs)[len(PROMPT) - 1 :], abs=1e-4)


class TestLeases:
    def test_a_row_waits_for_growth_and_goes_on_with_the_same_bits(self, engine: Engine) -> None:
        expected = serve_all(engine, [Ask(PROMPT, GREEDY, EARLY)])[0]
        serving = Serving(engine)
        rid = serving.submit(Ask(PROMPT, GREEDY, EARLY, limit_tokens=9))
        for _ in range(60):
            serving.step()
        assert 3 == len(serving.outcomes[rid].tokens)
        assert not serving.pump.has_work()
        assert 1 == serving.pump.counters.starved_latency
        serving.grow(rid, 14)
        assert serving.pump.has_work()
        serving.run()
        assert expected.bits == serving.outcomes[rid].bits
        assert 0 == serving.pump.counters.starved_pool

    def test_a_prompt_waits_for_growth_too(self, engine: Engine) -> None:
        expected = serve_all(engine, [Ask(PROMPT, GREEDY, EARLY)])[0]
        serving = Serving(engine)
        rid = serving.submit(Ask(PROMPT, GREEDY, EARLY, limit_tokens=5))
        for _ in range(10):
            serving.step()
        assert ([], False) == (serving.outcomes[rid].tokens, serving.pump.has_work())
        serving.grow(rid, 14)
        serving.run()
        assert expected.bits == serving.outcomes[rid].bits

    def test_the_final_lease_ends_the_row_with_a_warning(self, engine: Engine) -> None:
        serving = Serving(engine)
        rid = serving.submit(Ask(PROMPT, GREEDY, EARLY, limit_tokens=9))
        for _ in range(30):
            serving.step()
        serving.grow(rid, 11, is_final=True)
        serving.run()
        outcome = serving.outcomes[rid]
        assert outcome.fin is not None
        assert ("length", POOL_WARNING, 5) == (outcome.reason, outcome.fin.warning, len(outcome.tokens))
        assert 1 == serving.pump.counters.starved_pool

    def test_reports_count_positions_that_hold_kv(self, engine: Engine) -> None:
        serving = Serving(engine)
        serving.submit(Ask(PROMPT, GREEDY, LoopBounds(max_loops=1)))
        for _ in range(7):
            serving.step()
        counts = [unpack_list(I32, report.tokens) for report in serving.reports]
        moved = [count[0] for count in counts if count]
        assert [7, 8, 9, 10] == moved
        assert all(after > before for before, after in pairwise(moved))


class TestSlots:
    def test_an_evicted_row_ends_at_once_and_its_slot_serves_again(self, engine: Engine) -> None:
        expected = serve_alone(engine, asks(2))
        serving = Serving(engine)
        victim = serving.submit(Ask(PROMPT, Sampling(max_tokens=30, temperature=0.0)))
        for _ in range(7):
            serving.step()
        serving.evict(victim, "deadline")
        serving.step()
        fin = serving.outcomes[victim].fin
        assert fin is not None
        assert ("deadline", len(serving.outcomes[victim].tokens)) == (fin.reason, fin.tokens)
        assert unpack_list(I32, serving.reports[-1].freed_slots) == [0]
        serving.slots.sort()
        rids = [serving.submit(ask) for ask in asks(2)]
        serving.run()
        assert 2 == serving.gens[0]
        assert [outcome.bits for outcome in expected] == [serving.outcomes[rid].bits for rid in rids]

    def test_a_prompt_can_be_evicted_between_its_loops(self, engine: Engine) -> None:
        serving = Serving(engine)
        victim = serving.submit(Ask([3] * 30, GREEDY))
        serving.step()
        serving.step()
        serving.evict(victim)
        serving.slots.sort()
        rid = serving.submit(Ask(PROMPT, GREEDY))
        serving.run()
        assert "cancelled" == serving.outcomes[victim].reason
        assert serve_all(engine, [Ask(PROMPT, GREEDY)])[0].bits == serving.outcomes[rid].bits

    def test_stale_messages_are_counted_and_dropped(self, engine: Engine) -> None:
        serving = Serving(engine)
        rid = serving.submit(Ask(PROMPT, GREEDY))
        serving.step()
        pump = serving.pump
        slot, _ = serving.held[rid]
        pump.apply(Plan(epoch=EPOCH + 1, seq=9, evicts=[Evict(slot=slot, gen=1)]))
        serving.plan(evicts=[Evict(slot=slot, gen=2)])
        serving.plan(grows=[Grow(slot=slot, gen=7, pages=b"", limit_tokens=99)])
        serving.plan(joins=[serving._join(rid + 2, Ask(PROMPT, GREEDY))])
        busy = serving._join(rid + 4, Ask(PROMPT, GREEDY))
        serving.plan(joins=[busy, busy])
        assert 4 == pump.counters.stale_messages
        serving.outcomes |= {rid + 2: type(serving.outcomes[rid])(), rid + 4: type(serving.outcomes[rid])()}
        serving.run()
        assert 1 == len({serving.outcomes[each].bits for each in (rid, rid + 2, rid + 4)})

    def test_a_join_with_an_old_gen_is_stale_even_when_the_slot_is_free(self, engine: Engine) -> None:
        serving = Serving(engine)
        rid = serving.submit(Ask(PROMPT, GREEDY))
        join = serving._join(*serving.waiting.pop())
        serving.plan(joins=[join])
        serving.run()
        serving.plan(joins=[join])
        assert 1 == serving.pump.counters.stale_messages
        serving.step()
        assert 8 == len(serving.outcomes[rid].tokens)

    def test_reset_drops_every_slot_without_a_terminal(self, engine: Engine) -> None:
        serving = Serving(engine)
        for ask in asks(4):
            serving.submit(ask)
        for _ in range(5):
            serving.step()
        serving.pump.reset(control_epoch=8)
        output = serving.pump.collect()
        assert {} == output.to_gateways
        assert output.report is not None
        assert (8, 0, b"", b"") == (
            output.report.control_epoch,
            output.report.plan_seq,
            output.report.slots,
            output.report.freed_slots,
        )
        assert not serving.pump.has_work()
        fresh = Serving(engine, serving.pump)
        rids = [fresh.submit(ask) for ask in asks(3)]
        fresh.run()
        assert [each.bits for each in serve_alone(engine, asks(3))] == [fresh.outcomes[rid].bits for rid in rids]

    def test_an_idle_pump_has_nothing_to_do(self, engine: Engine) -> None:
        pump = engine.new_pump(EPOCH)
        pump.tick()
        assert not pump.has_work()
        assert (None, {}) == (pump.collect().report, pump.collect().to_gateways)

    def test_a_cached_prefix_is_not_computed_again(self, engine: Engine) -> None:
        prompt = list(range(3, 22))
        cold = Serving(engine)
        first = cold.submit(Ask(prompt, GREEDY))
        cold.run()
        warm = Serving(engine, cold.pump)
        rid = warm.submit(Ask(prompt, GREEDY))
        warm.outcomes[rid] = type(cold.outcomes[first])()
        before = cold.pump.counters.prompt_row_loops
        join = warm._join(*warm.waiting.pop())
        # The pages of the first run still hold its prompt: 4 whole pages of 4 tokens are reused as they are.
        warm.plan(
            joins=[
                type(join)(
                    **{name: getattr(join, name) for name in join.__struct_fields__} | {"gen": 2, "prefix_tokens": 16}
                )
            ]
        )
        warm.run()
        assert cold.outcomes[first].bits == warm.outcomes[rid].bits
        assert 4 * 3 == cold.pump.counters.prompt_row_loops - before
        assert (0, 16) == (cold.outcomes[first].cached_tokens, warm.outcomes[rid].cached_tokens)


class TestFaults:
    def test_a_row_whose_logits_break_ends_alone(self, folder: Path) -> None:
        engine = tiny_engine(folder)
        expected = serve_alone(engine, asks(4))
        serving = Serving(engine)
        rids = [serving.submit(ask) for ask in asks(4)]
        for _ in range(5):
            serving.step()
        _, pages = serving.held[rids[1]]
        done = len(serving.outcomes[rids[1]].tokens)
        engine.pool.poison(torch.tensor(pages))
        serving.run()
        broken = serving.outcomes[rids[1]]
        assert broken.fin is not None
        assert ("error", "server_error", done) == (broken.reason, broken.fin.code, len(broken.tokens))
        assert f"request {rids[1]}: the logits of output {done} are not finite at depth" in broken.fin.message
        others = [index for index in range(4) if index != 1]
        assert [expected[index].bits for index in others] == [serving.outcomes[rids[index]].bits for index in others]
        # Its pages hold NaN now; whoever gets them next must not see it.
        again = serving.submit(asks(4)[1])
        serving.slots.sort()
        serving.run()
        assert expected[1].bits == serving.outcomes[again].bits

    def test_the_canary_leaves_the_engine_as_it_was(self, engine: Engine) -> None:
        expected = [outcome.bits for outcome in serve_alone(engine, asks(2))]
        engine.canary()
        assert expected == [outcome.bits for outcome in serve_all(engine, asks(2))]

    def test_capabilities_state_what_is_served(self, engine: Engine) -> None:
        facts = engine.capabilities()
        assert ("ouro", 61, 64, 4, "ouro", True) == (
            facts.model_type,
            facts.vocab_size,
            facts.context_tokens,
            facts.loops,
            facts.exit_rule,
            facts.can_exit_early,
        )
        assert ([2], 6, 4, 16) == (
            unpack_list(I32, facts.eos_ids),
            facts.slots,
            facts.page_tokens,
            facts.total_pages // 6,
        )
        assert facts.page_bytes * facts.total_pages == 2 * engine.pool.k.nbytes * facts.total_pages // (
            facts.total_pages + 1
        )
