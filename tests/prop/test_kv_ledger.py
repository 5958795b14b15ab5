"""The ledger as a state machine beside a model that only keeps who holds what."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epicycle.kvstore.errors import KvError, PoolShort
from epicycle.kvstore.ledger import Hold, Ledger

TOTAL_PAGES = 12
OWNERS = st.integers(0, 5)


class LedgerMachine(RuleBasedStateMachine):
    """Claims, growth, sharing, holds and releases in any order, double ones and refused ones among them."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(TOTAL_PAGES)
        self.tables: dict[int, tuple[int, ...]] = {}
        self.holds: dict[int, tuple[Hold, tuple[int, ...]]] = {}

    def counts(self) -> Counter[int]:
        counts = Counter(page for table in self.tables.values() for page in table)
        counts.update(page for _, pages in self.holds.values() for page in pages)
        return counts

    def some_in_use(self, data: st.DataObject) -> tuple[int, ...]:
        in_use = sorted(self.counts())
        return tuple(data.draw(st.lists(st.sampled_from(in_use), unique=True, max_size=4))) if in_use else ()

    @rule(owner=OWNERS, fresh=st.integers(0, 7), data=st.data())
    def claim(self, owner: int, fresh: int, data: st.DataObject) -> None:
        shared, free = self.some_in_use(data), TOTAL_PAGES - len(self.counts())
        if owner in self.tables or fresh + len(shared) == 0 or fresh > free:
            with pytest.raises(KvError):
                self.ledger.claim(owner, fresh, shared)
            return
        before = self.counts()
        table = self.ledger.claim(owner, fresh, shared)
        assert shared == table[: len(shared)]
        assert not set(table[len(shared) :]) & before.keys()
        assert fresh == len(set(table[len(shared) :]))
        self.tables[owner] = table

    @precondition(lambda self: self.tables)
    @rule(fresh=st.integers(0, 5), data=st.data())
    def grow(self, fresh: int, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.tables)))
        before = self.counts()
        if fresh > TOTAL_PAGES - len(before):
            with pytest.raises(PoolShort):
                self.ledger.grow(owner, fresh)
            return
        taken = self.ledger.grow(owner, fresh)
        assert not set(taken) & before.keys()
        assert fresh == len(set(taken))
        self.tables[owner] += taken

    @rule(owner=OWNERS)
    def release(self, owner: int) -> None:
        self.ledger.release(owner)
        self.tables.pop(owner, None)

    @rule(kind=st.sampled_from(Hold), data=st.data())
    def hold(self, kind: Hold, data: st.DataObject) -> None:
        pages = self.some_in_use(data)
        self.holds[self.ledger.hold(kind, pages)] = (kind, pages)

    @rule(number=st.integers(0, 20))
    def drop(self, number: int) -> None:
        self.ledger.drop(number)
        self.holds.pop(number, None)

    @invariant()
    def counts_are_the_holders(self) -> None:
        counts = self.counts()
        assert [counts[page] for page in range(TOTAL_PAGES)] == [self.ledger.refs(page) for page in range(TOTAL_PAGES)]
        assert TOTAL_PAGES - len(counts) == self.ledger.free_pages
        assert len(counts) == self.ledger.used_pages

    @invariant()
    def a_page_in_two_tables_is_counted_twice(self) -> None:
        rows = Counter(page for owner in self.tables for page in self.ledger.pages_of(owner))
        assert rows == Counter(page for table in self.tables.values() for page in table)
        assert all(count <= self.ledger.refs(page) for page, count in rows.items())

    @invariant()
    def the_census_is_even_and_in_order(self) -> None:
        census = self.ledger.census()
        assert census.is_even, census.line()
        seen: set[int] = set()
        live = {page for table in self.tables.values() for page in table}
        classes = [self.held_by(Hold.LEASE), live, self.held_by(Hold.PREFIX), self.held_by(Hold.SNAPSHOT)]
        sizes = []
        for pages in classes:
            sizes.append(len(pages - seen))
            seen |= pages
        assert sizes == [
            census.leased_pages,
            census.live_pages,
            census.prefix_only_pages,
            census.snapshotting_pages,
        ]

    def held_by(self, kind: Hold) -> set[int]:
        return {page for held, pages in self.holds.values() if held is kind for page in pages}

    def teardown(self) -> None:
        """Whatever happened, letting go of everything frees every page."""
        for owner in self.tables:
            self.ledger.release(owner)
        for number in self.holds:
            self.ledger.drop(number)
        assert TOTAL_PAGES == self.ledger.free_pages
        assert list(range(TOTAL_PAGES)) == sorted(self.ledger.claim("last", TOTAL_PAGES))


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
