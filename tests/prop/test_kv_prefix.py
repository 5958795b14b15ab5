"""The pool with its prefix cache as a state machine: a page never lies about its tokens, and nobody loses one."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epicycle.kvstore.errors import PoolShort
from epicycle.kvstore.page_pool import PagePool
from epicycle.kvstore.prefix_keys import chain_keys, chain_root
from epicycle.transport.wire.columns import I32, pack

TOTAL_PAGES = 12
RESERVE_PAGES = 1
PIN_PAGES = 5
PAGE_TOKENS = 2
PIN_S = 3.0
OWNERS = st.integers(0, 4)
SALTS = st.sampled_from(["", "x"])
SESSIONS = st.sampled_from(["a", "b", "c"])
# Few tokens, so that prompts meet; a half page at the end now and then.
PROMPTS = st.builds(
    lambda pages, tail: [token for token in pages for _ in range(PAGE_TOKENS)] + tail,
    st.lists(st.integers(0, 1), min_size=1, max_size=5),
    st.lists(st.just(7), max_size=1),
)


class Row:
    """One live request as the model sees it."""

    def __init__(self, keys: tuple[bytes, ...], table: tuple[int, ...]) -> None:
        self.keys = keys
        self.table = table
        self.has_prompt = False
        self.is_parked = False


class PoolMachine(RuleBasedStateMachine):
    """Requests come, compute their prompts, grow and go; sessions pin; time passes; an operator resets."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(TOTAL_PAGES, RESERVE_PAGES)
        self.rows: dict[int, Row] = {}
        self.contents: dict[int, bytes] = {}  # what was last computed into a page
        self.pinned: dict[str, tuple[float, tuple[bytes, ...]]] = {}
        self.now_s = 0.0

    def known(self, keys: tuple[bytes, ...]) -> int:
        return self.pool.index.known(keys)

    @rule(owner=OWNERS, prompt=PROMPTS, more=st.integers(0, 7), hits=st.booleans(), salt=SALTS, is_urgent=st.booleans())
    def claim(self, owner: int, prompt: list[int], more: int, hits: bool, salt: str, is_urgent: bool) -> None:
        if owner in self.rows:
            return
        keys = chain_keys(chain_root("weights", salt), pack(I32, prompt), PAGE_TOKENS)
        pages = -(-len(prompt) // PAGE_TOKENS) + more
        most_hits = len(keys) if hits else 0
        before = self.state()
        known, index = self.known(keys[:most_hits]), self.pool.index
        fits = pages - index.in_use(keys[:most_hits]) <= self.pool.available_pages
        if is_urgent:
            fits = pages - index.in_rows(keys[:most_hits]) <= self.pool.obtainable_pages
        try:
            table = self.pool.claim(owner, pages, keys, most_hits, is_urgent=is_urgent)
        except PoolShort:
            assert not fits
            assert before == self.state()
            return
        if is_urgent:
            self.break_pins()
        assert known == self.pool.hits_of(owner)
        assert [*keys[:known]] == [self.contents[page] for page in table[:known]]
        taken = Counter(page for row in self.rows.values() for page in row.table)
        assert not taken.keys() & set(table[known:])
        for page in table[known:]:
            self.contents.pop(page, None)
        self.rows[owner] = Row(keys, table)

    def break_pins(self) -> None:
        """The oldest pins are gone where an urgent claim needed their pages."""
        while len(self.pinned_keys()) > self.pool.index.pinned_pages:
            assert 0 == self.pool.free_pages, "pins are not broken for nothing"
            self.pinned.pop(min(self.pinned, key=lambda name: self.pinned[name][0]))

    def state(self) -> tuple[int, ...]:
        index = self.pool.index
        return (len(index), index.idle_pages, index.pinned_pages, index.unreferenced_pages, self.pool.free_pages)

    @precondition(lambda self: self.rows)
    @rule(pages=st.integers(1, 6), data=st.data())
    def grow(self, pages: int, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.rows)))
        if self.rows[owner].is_parked:
            return
        before = self.state()
        if pages > self.pool.available_pages:
            with pytest.raises(PoolShort):
                self.pool.grow(owner, pages)
            assert before == self.state()
            return
        taken = self.pool.grow(owner, pages)
        assert not set(taken) & {page for row in self.rows.values() for page in row.table}
        for page in taken:
            self.contents.pop(page, None)
        self.rows[owner].table += taken

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def complete_prompt(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.rows)))
        self.compute(owner)
        self.pool.publish(owner)

    def compute(self, owner: int) -> None:
        row = self.rows[owner]
        row.has_prompt = True
        for key, page in zip(row.keys, row.table, strict=False):
            assert self.contents.setdefault(page, key) == key, "a shared page is written with what it holds"

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        """Its pages are being copied to the host: nobody gets one of them before it leaves."""
        owner = data.draw(st.sampled_from(sorted(self.rows)))
        row = self.rows[owner]
        if row.is_parked:
            return
        before = self.state()
        self.pool.park(owner)
        row.is_parked = True
        assert before == self.state()

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), at_once=st.booleans())
    def leave(self, data: st.DataObject, at_once: bool) -> None:
        owner = data.draw(st.sampled_from(sorted(self.rows)))
        if at_once:
            self.compute(owner)  # its prompt's end and its own are reported together
        row = self.rows.pop(owner)
        assert row.keys == self.pool.release(owner, has_prompt=row.has_prompt)

    @rule(session=SESSIONS, prompt=PROMPTS)
    def pin(self, session: str, prompt: list[int]) -> None:
        keys = chain_keys(chain_root("weights", ""), pack(I32, prompt), PAGE_TOKENS)
        path = keys[: self.known(keys)][:PIN_PAGES]
        self.pool.index.pin(session, keys, self.now_s + PIN_S, PIN_PAGES)
        self.pinned.pop(session, None)
        while len({*path, *self.pinned_keys()}) > PIN_PAGES:
            self.pinned.pop(min(self.pinned, key=lambda name: self.pinned[name][0]))
        if path:
            self.pinned[session] = (self.now_s + PIN_S, path)

    def pinned_keys(self) -> set[bytes]:
        return {key for _, keys in self.pinned.values() for key in keys}

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.pool.index.expire(self.now_s)
        self.pinned = {name: pin for name, pin in self.pinned.items() if pin[0] > self.now_s}

    @rule()
    def reset(self) -> None:
        idle = self.pool.index.unreferenced_pages
        assert idle == self.pool.reset()
        assert 0 == len(self.pool.index)
        self.pinned = {}

    @rule()
    def tick(self) -> None:
        """Pins made at one moment would tie in the model."""
        self.now_s += 1e-3

    @invariant()
    def every_page_is_counted_once(self) -> None:
        census, index = self.pool.census(), self.pool.index
        assert census.is_even, census.line()
        live = {page for row in self.rows.values() if not row.is_parked for page in row.table}
        parked = {page for row in self.rows.values() if row.is_parked for page in row.table} - live
        listed = {node.page for node in index._nodes.values()}
        counts = (len(live), index.unreferenced_pages + len(parked & listed), self.pool.free_pages)
        assert counts == (census.live_pages, census.prefix_only_pages, census.free_pages)
        assert len(parked - listed) == census.snapshotting_pages
        assert TOTAL_PAGES == sum(counts) + census.snapshotting_pages
        assert max(0, index.idle_pages - RESERVE_PAGES) + self.pool.free_pages == self.pool.available_pages

    @invariant()
    def live_pages_and_pinned_ones_stay(self) -> None:
        for row in self.rows.values():
            assert all(self.pool.ledger.refs(page) for page in row.table)
        for _, keys in self.pinned.values():
            assert len(keys) == self.known(keys)
            assert len(keys) == self.pool.index.in_use(keys)
        assert len(self.pinned_keys()) == self.pool.index.pinned_pages <= PIN_PAGES

    def teardown(self) -> None:
        """Once everybody has left, whatever is cached can be had, down to the reserve."""
        for owner, row in list(self.rows.items()):
            self.pool.release(owner, has_prompt=row.has_prompt)
        self.pool.index.expire(self.now_s + PIN_S)
        assert 0 == self.pool.index.pinned_pages
        assert TOTAL_PAGES - min(RESERVE_PAGES, len(self.pool.index)) == self.pool.available_pages
        available = self.pool.available_pages
        assert available == len(set(self.pool.claim("last", available)))
        assert min(RESERVE_PAGES, len(self.pool.index)) == len(self.pool.index)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
