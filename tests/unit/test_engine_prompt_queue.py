"""Whose prompt rows are read next: order of arrival, and short prompts beside a long one."""

from __future__ import annotations

from epicycle.engine.route import LEAST_ROWS, Chunk, PromptQueue, Resident
from epicycle.engine.sampling import SamplingParams
from epicycle.transport.wire.columns import I32, pack
from epicycle.transport.wire.plan import Join
from epicycle.transport.wire.request import LoopBounds, Sampling

LOOPS, BUDGET = 4, 256


def resident(slot: int, prompt_tokens: int, written_tokens: int = 0) -> Resident:
    join = Join(
        rid=slot, gateway=0, slot=slot, gen=1, prompt=pack(I32, [1]), pages=b"", limit_tokens=1 << 20,
        sampling=Sampling(max_tokens=4), loops=LoopBounds(),
    )  # fmt: skip
    return Resident(
        join=join, params=SamplingParams(), prompt_tokens=prompt_tokens, limit_tokens=1 << 20, pages=[], joined_s=0.0,
        written_tokens=written_tokens, max_loops=LOOPS, is_fixed_depth=True,
    )  # fmt: skip


def queue(*waiting: Resident) -> PromptQueue:
    prompts = PromptQueue(is_serial=False, most_chunks=32)
    for one in waiting:
        prompts.add(one)
    return prompts


def counts(chunks: list[Chunk]) -> dict[int, int]:
    return {chunk.resident.slot: chunk.count for chunk in chunks}


def rounds_until_read(prompts: PromptQueue, slots: set[int]) -> int:
    """How many times chunks start until the prompts of `slots` have been read."""
    rounds, left = 0, set(slots)
    while left:
        rounds += 1
        for _ in range(LOOPS):
            finished = prompts.advance(prompts.take(BUDGET), LOOPS)
            left -= {chunk.resident.slot for chunk in finished if chunk.ends_prompt}
    return rounds


def test_prompts_of_like_length_are_read_in_order_of_arrival() -> None:
    assert {1: 256} == counts(queue(resident(1, 1000), resident(2, 900), resident(3, 300)).take(BUDGET))
    assert {1: 100, 2: 156} == counts(queue(resident(1, 100), resident(2, 900)).take(BUDGET))


def test_short_prompts_share_with_a_long_one_that_came_first() -> None:
    prompts = queue(resident(1, 9000), resident(2, 100), resident(3, 100))
    assert {1: 128, 2: 100, 3: 28} == counts(prompts.take(BUDGET))


def test_a_long_prompt_that_is_not_the_first_waits_for_its_turn() -> None:
    prompts = queue(resident(1, 9000), resident(2, 8000), resident(3, 300))
    assert {1: 128, 3: 128} == counts(prompts.take(BUDGET))


def test_deep_in_its_context_a_long_prompt_shares_by_work_and_never_stops() -> None:
    prompts = queue(resident(1, 60_000, written_tokens=40_000), resident(2, 1000))
    assert {1: LEAST_ROWS, 2: BUDGET - LEAST_ROWS} == counts(prompts.take(BUDGET))


def test_a_small_budget_is_shared_too() -> None:
    assert {1: 32, 2: 24, 3: 8} == counts(queue(resident(1, 400), resident(2, 24), resident(3, 24)).take(64))


def test_short_prompts_wait_at_most_twice_as_long_beside_a_long_one() -> None:
    short = [resident(slot, 120) for slot in range(2, 9)]
    alone = rounds_until_read(queue(*short), set(range(2, 9)))
    again = [resident(slot, 120) for slot in range(2, 9)]
    assert rounds_until_read(queue(resident(1, 60_000), *again), set(range(2, 9))) <= 2 * alone


def test_prompts_read_position_by_position_take_one_row_each() -> None:
    prompts = PromptQueue(is_serial=True, most_chunks=32)
    for one in (resident(1, 9000), resident(2, 100)):
        prompts.add(one)
    assert {1: 1, 2: 1} == counts(prompts.take(BUDGET))
