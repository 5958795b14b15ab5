"""The pool plan: what the bytes left for KV are spent on, in funding order.

  1. the engine's own window W, the pages of one full context
  2. fixed state of every further slot, and one page (or one prompt chunk, `run`) each
  3. further whole windows, as many as slots and room allow
  4. the cache reserve, prefix pages that live growth may not evict below
  5. pages with the rest, at most one window per slot

      windows = clamp(1 + floor((room - W) / (W + fixed)), 1, slots)
      held    = max((slots - 1) * max(page, run), (windows - 1) * W)
      left    = room - W - (slots - 1) * fixed
      cache   = min(cap, max(0, left - held))
      live    = min(slots * W / page, floor((left - cache + W) / page))

The pool is one: live and cache pages come from the same list, and slots share a long window instead of owning one each.
Owns these formulas and the texts about them. Must not know devices, or how `room` was measured.
"""

from __future__ import annotations

import msgspec

from epicycle.kvstore.errors import PlanRefused
from epicycle.kvstore.reserve import pages_for

GIB = 1 << 30
MIB = 1 << 20
DERIVED_TERMS = ("window_bytes", "total_pages", "pool_bytes", "spare_bytes")


class PoolRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to plan for. Raises PlanRefused for numbers below their least."""

    room_bytes: int
    """Bytes left for KV pages and per-slot state."""
    page_bytes: int
    page_tokens: int
    context_limit_tokens: int
    """The most positions a request may have: the model's limit, or what the operator asked for."""
    context_is_auto: bool = False
    """True: the largest context that the room funds, up to the limit. False: the limit, or refuse."""
    slots: int
    slots_may_shrink: bool = False
    """True: serve fewer slots where the room ends. False: refuse."""
    fixed_bytes: int = 0
    """State of one slot outside the pages."""
    run_pages: int = 1
    """Pages that one prompt chunk of one request touches."""
    cache_bytes: int = 0
    cache_may_shrink: bool = True
    """True: cache_bytes is a cap. False: refuse where it isn't funded."""
    most_windows: int | None = None
    """Cap on whole windows funded before the cache; None: one per slot."""

    def __post_init__(self) -> None:
        for name in ("page_bytes", "page_tokens", "context_limit_tokens", "slots", "run_pages"):
            self._require_at_least(name, 1)
        for name in ("room_bytes", "fixed_bytes", "cache_bytes"):
            self._require_at_least(name, 0)
        if self.most_windows is not None:
            self._require_at_least("most_windows", 1)

    def _require_at_least(self, name: str, least: int) -> None:
        if getattr(self, name) < least:
            raise PlanRefused(f"{name} is {getattr(self, name)}; it must be at least {least}")

    @property
    def step_bytes(self) -> int:
        """The least that a slot must be able to take beyond its fixed state: max(page, run)."""
        return self.page_bytes * self.run_pages

    @property
    def owed_cache_bytes(self) -> int:
        """The part of the cache that may not shrink."""
        return 0 if self.cache_may_shrink else self.cache_bytes


class PoolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Every term of the plan; `line()` says the same in words."""

    room_bytes: int
    page_bytes: int
    page_tokens: int
    context_tokens: int
    slots: int
    asked_slots: int
    windows: int
    window_pages: int
    fixed_bytes: int
    held_bytes: int
    left_bytes: int
    cache_bytes: int
    live_pages: int
    cache_pages: int

    @property
    def window_bytes(self) -> int:
        return self.window_pages * self.page_bytes

    @property
    def total_pages(self) -> int:
        """Pages to allocate; live growth may take all but `cache_pages` of them."""
        return self.live_pages + self.cache_pages

    @property
    def pool_bytes(self) -> int:
        return self.total_pages * self.page_bytes

    @property
    def spare_bytes(self) -> int:
        """Room that no page uses: every slot already has a whole window, or less than a page is left."""
        return self.room_bytes - (self.slots - 1) * self.fixed_bytes - self.pool_bytes

    def terms(self) -> dict[str, int]:
        """Every term by name, for machines."""
        own = {name: int(getattr(self, name)) for name in self.__struct_fields__}
        return own | {name: getattr(self, name) for name in DERIVED_TERMS}

    def line(self) -> str:
        """The start-up line."""
        fewer = f" ({self.asked_slots} asked)" if self.asked_slots != self.slots else ""
        return (
            f"kv pool: {self.slots} slots{fewer} x {self.context_tokens:,} tokens of context, "
            f"{self.total_pages:,} pages of {self.page_tokens} tokens and {self.page_bytes / MIB:.2f} MiB "
            f"= {self.pool_bytes / GIB:.2f} GiB in {self.room_bytes / GIB:.2f} GiB of room; "
            f"a window is {self.window_pages:,} pages = {self.window_bytes / GIB:.2f} GiB, "
            f"{self.windows} funded, {self.live_pages / self.window_pages:.2f} fit; "
            f"fixed {self.fixed_bytes / MIB:.2f} MiB a slot, left {self.left_bytes / GIB:.2f} GiB, "
            f"held {self.held_bytes / GIB:.2f} GiB, cache reserve {self.cache_bytes / GIB:.2f} GiB "
            f"= {self.cache_pages:,} pages, spare {self.spare_bytes / GIB:.2f} GiB"
        )


def plan_pool(ask: PoolRequest) -> PoolPlan:
    """Spend the room in funding order. Raises PlanRefused with slots, GiB needed, window and GiB left."""
    context_tokens = _auto_context_tokens(ask) if ask.context_is_auto else ask.context_limit_tokens
    window_pages = pages_for(context_tokens, ask.page_tokens)
    slots = _funded_slots(ask, context_tokens, window_pages * ask.page_bytes)
    plan = _spend(ask, context_tokens, window_pages, slots)
    _require_cache(ask, plan)
    return plan


def _auto_context_tokens(ask: PoolRequest) -> int:
    """The largest context whose window fits beside what the other slots must have; at least one page."""
    others = (ask.slots - 1) * (ask.fixed_bytes + ask.step_bytes)
    window_pages = max(1, (ask.room_bytes - others - ask.owed_cache_bytes) // ask.page_bytes)
    return min(ask.context_limit_tokens, window_pages * ask.page_tokens)


def _funded_slots(ask: PoolRequest, context_tokens: int, window: int) -> int:
    """Slots that fit beside one window, or PlanRefused."""
    left = ask.room_bytes - window - ask.owed_cache_bytes
    each = ask.fixed_bytes + ask.step_bytes
    funded = min(ask.slots, 1 + left // each)
    if left >= 0 and (funded == ask.slots or ask.slots_may_shrink):
        return funded
    others = (ask.slots - 1) * each
    cache = f" and {ask.owed_cache_bytes / GIB:.2f} GiB of cache" if ask.owed_cache_bytes else ""
    raise PlanRefused(
        f"{ask.slots} slots of {context_tokens:,} tokens need one window of {window / GIB:.2f} GiB, "
        f"{others / GIB:.2f} GiB for {ask.slots - 1} further slots{cache}: "
        f"{(window + others + ask.owed_cache_bytes) / GIB:.2f} GiB, and {ask.room_bytes / GIB:.2f} GiB are left for "
        f"KV: lower context_tokens or slots, or raise kv_memory_bytes"
    )


def _spend(ask: PoolRequest, context_tokens: int, window_pages: int, slots: int) -> PoolPlan:
    """The formulas of the module docstring."""
    page, fixed, room = ask.page_bytes, ask.fixed_bytes, ask.room_bytes
    window = window_pages * page
    most_windows = slots if ask.most_windows is None else min(slots, ask.most_windows)
    windows = min(1 + (room - window) // (window + fixed), most_windows)
    held = max((slots - 1) * ask.step_bytes, (windows - 1) * window)
    left = room - window - (slots - 1) * fixed
    cache = min(ask.cache_bytes, max(0, left - held))
    return PoolPlan(
        room_bytes=room,
        page_bytes=page,
        page_tokens=ask.page_tokens,
        context_tokens=context_tokens,
        slots=slots,
        asked_slots=ask.slots,
        windows=windows,
        window_pages=window_pages,
        fixed_bytes=fixed,
        held_bytes=held,
        left_bytes=left,
        cache_bytes=cache,
        live_pages=min(slots * window_pages, (left - cache + window) // page),
        cache_pages=cache // page,
    )


def _require_cache(ask: PoolRequest, plan: PoolPlan) -> None:
    """Windows come before the cache, so a cache that may not shrink can lose to them."""
    if plan.cache_bytes < ask.owed_cache_bytes:
        raise PlanRefused(
            f"a cache of {ask.cache_bytes / GIB:.2f} GiB beside {plan.slots} slots and {plan.windows} windows of "
            f"{plan.window_bytes / GIB:.2f} GiB: {max(0, plan.left_bytes - plan.held_bytes) / GIB:.2f} GiB are left: "
            "lower cache_bytes, most_windows, slots or context_tokens"
        )
