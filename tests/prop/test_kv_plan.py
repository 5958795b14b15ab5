"""The pool plan keeps its promises whatever it is asked for."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from epicycle.kvstore.errors import PlanRefused
from epicycle.kvstore.plan import PoolPlan, PoolRequest, plan_pool


def requests(**fixed: bool) -> st.SearchStrategy[PoolRequest]:
    """Small requests of every kind, with the named choices fixed."""
    choices = ("context_is_auto", "slots_may_shrink", "cache_may_shrink")
    return st.builds(
        PoolRequest,
        room_bytes=st.integers(0, 40_000),
        page_bytes=st.integers(1, 300),
        page_tokens=st.integers(1, 16),
        context_limit_tokens=st.integers(1, 300),
        slots=st.integers(1, 12),
        fixed_bytes=st.integers(0, 200),
        run_pages=st.integers(1, 4),
        cache_bytes=st.integers(0, 5_000),
        most_windows=st.none() | st.integers(1, 4),
        **{name: st.just(fixed[name]) if name in fixed else st.booleans() for name in choices},
    )


PACE = settings(max_examples=300, deadline=None)


def plan_or_none(ask: PoolRequest) -> PoolPlan | None:
    try:
        return plan_pool(ask)
    except PlanRefused:
        return None


@PACE
@given(requests())
def test_a_plan_fits_the_room_and_funds_what_it_promises(ask: PoolRequest) -> None:
    plan = plan_or_none(ask)
    assume(plan is not None)
    assert plan is not None
    assert plan.pool_bytes + (plan.slots - 1) * plan.fixed_bytes <= ask.room_bytes
    assert plan.window_pages <= plan.live_pages <= plan.slots * plan.window_pages
    assert min(plan.slots * plan.window_pages, plan.window_pages + (plan.slots - 1) * ask.run_pages) <= plan.live_pages
    assert 1 <= plan.windows <= plan.slots <= ask.slots
    assert plan.window_pages * ask.page_tokens >= plan.context_tokens
    assert ask.owed_cache_bytes <= plan.cache_bytes <= ask.cache_bytes


@PACE
@given(requests())
def test_nothing_shrinks_unless_it_may(ask: PoolRequest) -> None:
    plan = plan_or_none(ask)
    assume(plan is not None)
    assert plan is not None
    assert ask.slots_may_shrink or plan.slots == ask.slots
    assert ask.context_is_auto or plan.context_tokens == ask.context_limit_tokens


@PACE
@given(requests(slots_may_shrink=False, cache_may_shrink=True), st.integers(1, 5_000))
def test_more_room_never_gives_less(ask: PoolRequest, more: int) -> None:
    fields = {name: getattr(ask, name) for name in ask.__struct_fields__}
    small, large = plan_or_none(ask), plan_or_none(PoolRequest(**fields | {"room_bytes": ask.room_bytes + more}))
    assume(small is not None)
    assert small is not None
    assert large is not None
    assert small.context_tokens <= large.context_tokens
    assert small.total_pages <= large.total_pages + 1  # live and cache pages round down apart
