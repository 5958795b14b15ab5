"""The barriers of prompt attention for Hopper as a model: warps and copies come in any order, and nobody may wait for
ever or read a place that is being filled.

The model says what `hopper_prompt_triton` and `hopper_prompt_feed` do with their barriers, and nothing of what they
compute; whoever changes those changes this. Random orders find what a card shows once in a while, if at all.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

pytest.importorskip("triton", reason="triton isn't installed: pip install 'triton>=3.6'")

from epicycle.engine.kernels import hopper_prompt_feed

K_SLOTS, V_SLOTS = hopper_prompt_feed.K_SLOTS.value, hopper_prompt_feed.V_SLOTS.value
Waits = tuple["Barrier", int] | None  # a barrier and a phase's parity; None: nothing, somebody else may go first
Job = tuple[int, int]  # tiles that the first group sees, and the second; those of the job are the more of the two


class Stuck(Exception):
    """Everybody waits, and no copy is under way."""


@dataclass
class Barrier:
    """As on the card: a phase ends when all arrivals and copies are there, and of phases one sees parities."""

    arrivals: int
    parity: int = 0
    missing: int = 0
    copies: int = 0

    def __post_init__(self) -> None:
        self.missing = self.arrivals

    def arrive(self, copies: int = 0) -> None:
        assert self.missing, "more arrivals than a phase has"
        self.missing -= 1
        self.copies += copies
        self._look()

    def copied(self) -> None:
        self.copies -= 1
        self._look()

    def _look(self) -> None:
        if not self.missing and not self.copies:
            self.parity, self.missing = self.parity ^ 1, self.arrivals

    def has_ended(self, parity: int) -> bool:
        return self.parity != parity


@dataclass
class Place:
    """Of one tile, or of queries, in shared memory."""

    held: int | None = None
    is_filling: bool = False
    readers: int = 0

    def read(self, what: int) -> None:
        assert not self.is_filling and self.held == what, f"{what} is wanted, and {self.held} is there"
        self.readers += 1


def barriers(count: int, arrivals: int = 1) -> list[Barrier]:
    return [Barrier(arrivals) for _ in range(count)]


@dataclass
class Program:
    groups: int
    jobs: Sequence[Job]
    waits_for_others: bool = True  # a group waits for tiles that only the other one sees
    copies: list[tuple[Place, int, Barrier]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.q, self.k, self.v = Place(), [Place() for _ in range(K_SLOTS)], [Place() for _ in range(V_SLOTS)]
        self.q_full, self.q_empty = Barrier(1), Barrier(self.groups)
        self.k_full, self.v_full = barriers(K_SLOTS), barriers(V_SLOTS)
        self.done = [barriers(K_SLOTS) for _ in range(self.groups)]
        self.mail_full, self.mail_empty = barriers(2), barriers(2, self.groups)
        self.letters = [0, 0]
        self.turns = barriers(2) if self.groups == 2 else []
        if self.turns:
            self.turns[0].arrive()

    def tiles(self, job: int) -> int:
        return max(self.jobs[job][: self.groups]) if job < len(self.jobs) else 0

    def fill(self, place: Place, what: int, full: Barrier) -> None:
        assert not place.readers and not place.is_filling, f"{what} comes where {place.held} is being read"
        place.is_filling = True
        self.copies.append((place, what, full))

    def produce(self) -> Iterator[Waits]:
        count = 0
        for job in range(len(self.jobs) + 1):
            letter = job & 1
            yield self.mail_empty[letter], (job >> 1 & 1) ^ 1
            self.letters[letter] = job
            yield None
            self.mail_full[letter].arrive()
            if job == len(self.jobs):
                return
            yield self.q_empty, (job & 1) ^ 1
            self.q_full.arrive(copies=1)
            self.fill(self.q, job, self.q_full)
            for _ in range(self.tiles(job)):
                yield None
                slot, v_slot = count % K_SLOTS, count % V_SLOTS
                for group in range(self.groups):
                    yield self.done[group][slot], (count // K_SLOTS & 1) ^ 1
                self.k_full[slot].arrive(copies=1)
                self.fill(self.k[slot], count, self.k_full[slot])
                yield None
                self.v_full[v_slot].arrive(copies=1)
                self.fill(self.v[v_slot], count, self.v_full[v_slot])
                count += 1

    def consume(self, group: int) -> Iterator[Waits]:
        count, job = 0, 0
        while True:
            letter = job & 1
            yield self.mail_full[letter], job >> 1 & 1
            assert self.letters[letter] == job
            if job == len(self.jobs):
                return
            own = self.jobs[job][group]
            yield self.q_full, job & 1
            if own:
                self.q.read(job)
                yield None
                self.q.readers -= 1
                yield from self._attend(group, count, own)
            else:
                self.q_empty.arrive()
            yield from self._pass_over(group, range(count + own, count + self.tiles(job)))
            assert self.letters[letter] == job
            count += self.tiles(job)
            yield None
            self.mail_empty[letter].arrive()
            job += 1

    def _attend(self, group: int, first: int, own: int) -> Iterator[Waits]:
        for tile in range(first, first + own):
            slot, before = tile % K_SLOTS, self.v[(tile - 1) % V_SLOTS]
            yield self.k_full[slot], tile // K_SLOTS & 1
            yield from self._take_turn(group, tile)
            self.k[slot].read(tile)
            if tile > first:
                before.read(tile - 1)
            yield None
            self._give_turn(group)
            yield None
            self.k[slot].readers -= 1
            if tile == first:
                self.q_empty.arrive()
                yield None
            self.done[group][slot].arrive()
            yield self.v_full[tile % V_SLOTS], tile // V_SLOTS & 1
            if tile > first:
                before.readers -= 1
        last = self.v[(first + own - 1) % V_SLOTS]
        last.read(first + own - 1)
        yield None
        last.readers -= 1

    def _pass_over(self, group: int, tiles: range) -> Iterator[Waits]:
        for tile in tiles:
            if self.waits_for_others:
                yield self.k_full[tile % K_SLOTS], tile // K_SLOTS & 1
            yield from self._take_turn(group, tile)
            self._give_turn(group)
            yield None
            self.done[group][tile % K_SLOTS].arrive()

    def _take_turn(self, group: int, tile: int) -> Iterator[Waits]:
        if self.turns:
            yield self.turns[group], tile & 1

    def _give_turn(self, group: int) -> None:
        if self.turns:
            self.turns[1 - group].arrive()


def run(program: Program, rng: random.Random) -> None:
    """In an order of the generator's, some quicker than others. Raises Stuck, AssertionError."""
    warps: dict[Iterator[Waits], Waits] = {program.produce(): None}
    warps |= {program.consume(group): None for group in range(program.groups)}
    paces = {warp: rng.choice((1, 1, 5, 30)) for warp in warps}
    copy_pace = rng.choice((1, 5, 50))
    while warps:
        ready = [warp for warp, waits in warps.items() if waits is None or waits[0].has_ended(waits[1])]
        pace = [paces[warp] for warp in ready] + ([copy_pace] if program.copies else [])
        if not pace:
            raise Stuck
        chosen = rng.choices(range(len(pace)), pace)[0]
        if chosen == len(ready):
            place, what, full = program.copies.pop(rng.randrange(len(program.copies)))
            place.held, place.is_filling = what, False
            full.copied()
            continue
        try:
            warps[ready[chosen]] = next(ready[chosen])
        except StopIteration:
            del warps[ready[chosen]]


def some_jobs(rng: random.Random, groups: int) -> list[Job]:
    """Of few tiles and of many. The first of two groups has rows always, and sees as much as the second or less."""
    jobs: list[Job] = []
    for _ in range(rng.randint(1, 9)):
        tiles = rng.choice((1, 1, 1, 2, 3, 7))
        jobs.append(rng.choice(((tiles, tiles), (tiles, 0), (max(1, tiles - 1), tiles))) if groups == 2 else (tiles, 0))
    return jobs


@pytest.mark.parametrize("groups", [1, 2])
def test_jobs_end_in_any_order_of_things_and_see_what_is_theirs(groups: int) -> None:
    for seed in range(400):
        rng = random.Random(seed)
        run(Program(groups, some_jobs(rng, groups)), rng)


def test_a_group_that_doesn_t_wait_for_tiles_it_only_passes_over_can_stop_everybody() -> None:
    stuck = 0
    for seed in range(400):
        rng = random.Random(seed)
        try:
            run(Program(2, some_jobs(rng, 2), waits_for_others=False), rng)
        except Stuck:
            stuck += 1
    assert stuck
