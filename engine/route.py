"""Which rows the next tick computes: decode rows that may run, and chunks of prompts on their way through the loops.

Owns the host's account of each resident request (`Resident`) and the prompt queue. A chunk is a run of prompt rows of
one request that walks depth 0 .. D - 1, one loop a tick; the rows of all chunks in flight never exceed the budget, so a
running stream never waits longer than one loop of it. Decides from host numbers only; it touches no tensor and must not
know what a row computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from epicycle.engine.sampling import SamplingParams
from epicycle.transport.wire.plan import Join


@dataclass(slots=True, kw_only=True)
class Resident:
    """One request in its slot, as the host knows it."""

    join: Join
    params: SamplingParams
    prompt_tokens: int
    limit_tokens: int
    pages: list[int]
    joined_s: float
    written_tokens: int  # positions that hold KV in every loop
    is_decoding: bool = False
    loops_done: int = 0  # of the token being decoded
    outputs: int = 0
    is_final: bool = False  # the pool has no more pages for it
    is_parked: bool = False  # on its way off the device, or back
    first_token_s: float = 0.0
    max_loops: int
    is_fixed_depth: bool  # every token takes `max_loops`: nothing that a tick finds out can change it
    # The same three for rows of fixed depth once every launched tick has run; others are known only when harvested.
    planned_loops: int = 0
    planned_written: int = 0
    planned_outputs: int = 0

    @property
    def slot(self) -> int:
        return self.join.slot

    @property
    def begun_tokens(self) -> int:
        """Positions that hold anything: a token between two loops has written some of its planes."""
        return self.written_tokens + (self.loops_done > 0)

    @property
    def samples(self) -> bool:
        """Its prompt is followed by tokens."""
        return self.join.sampling.max_tokens > 0 and self.join.exports is None

    @property
    def head_to(self) -> int:
        """The head row that keeps its prompt's end; -1 for none."""
        return self.join.head_to if self.join.exports is None else self.slot

    @property
    def head_from(self) -> int:
        """The head row that its first token is sampled from; -1 where its prompt is computed."""
        return self.join.head_from if self.join.imports is None else self.slot

    @property
    def may_run(self) -> bool:
        """A decode row that the next tick should take, as far as the host can tell."""
        if not self.is_decoding or self.is_parked or self.is_starved:
            return False
        if not self.is_fixed_depth:
            return True
        is_covered = self.planned_loops > 0 or self.planned_written < self.limit_tokens
        return is_covered and self.planned_outputs < self.join.sampling.max_tokens

    @property
    def may_leave(self) -> bool:
        """Its token may take its last loop in the next tick."""
        return not self.is_fixed_depth or self.planned_loops + 1 >= self.max_loops

    def start_decoding(self) -> None:
        """The tick just launched samples its first token; from the next one on it is a decode row."""
        self.is_decoding = True
        self.planned_written = self.prompt_tokens
        self.planned_outputs = 1

    def plan_loops(self, loops: int) -> None:
        """A tick that runs `loops` of its loops has been launched."""
        self.planned_loops += loops
        if self.planned_loops >= self.max_loops:
            self.planned_loops = 0
            self.planned_written += 1
            self.planned_outputs += 1

    def come_back(self, join: Join, pages: list[int]) -> None:
        """It has a slot and a page table again, after it has been away."""
        self.join, self.pages, self.limit_tokens = join, pages, join.limit_tokens
        self.planned_loops, self.planned_written = self.loops_done, self.written_tokens
        self.planned_outputs = self.outputs

    @property
    def is_starved(self) -> bool:
        """At the start of a position that the lease doesn't cover."""
        return self.written_tokens >= self.limit_tokens and self.loops_done == 0


@dataclass(slots=True, eq=False)
class Chunk:
    """Prompt rows `first` .. `first + count - 1` of one resident, about to run loop `depth`."""

    resident: Resident
    first: int
    count: int
    depth: int = 0

    @property
    def end(self) -> int:
        return self.first + self.count

    @property
    def ends_prompt(self) -> bool:
        return self.end == self.resident.prompt_tokens

    @property
    def keeps_head(self) -> bool:
        """Once its last loop has run, its last row goes to a head row."""
        return self.ends_prompt and self.resident.head_to >= 0


@dataclass(frozen=True, slots=True)
class TickWork:
    """The rows of one tick: decode rows in this order, then the chunks' rows in theirs.

    `loops` more than 1: decode rows alone, all at the start of a token that takes exactly so many loops.
    """

    decode: list[Resident]
    chunks: list[Chunk]
    loops: int = 1

    @property
    def prompt_rows(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


QUICK = 4  # a prompt of at most one part in so many of the first one's rest doesn't wait for it
EVEN_TOKENS = 5000  # of context, whose attention takes a row as long as its products: Ouro 1.4B on an H200
LEAST_ROWS = 64  # of a long prompt's chunk: one tile of queries


class PromptQueue:
    """Requests whose prompts are being read, oldest first, and their chunks in flight: at most one each.

    The oldest has all the room it can use. Only while much shorter prompts wait does it share: it keeps half of a
    tick's work, and the short ones have the rest, in order of arrival.

    `is_serial`: the layout overwrites planes, so a chunk is one row and the next waits for its last loop.
    """

    def __init__(self, is_serial: bool, most_chunks: int) -> None:
        self._is_serial = is_serial
        self._most_chunks = most_chunks
        self._waiting: dict[int, Resident] = {}  # by slot, in order of arrival
        self._in_flight: dict[int, Chunk] = {}

    def add(self, resident: Resident) -> None:
        self._waiting[resident.slot] = resident

    def drop(self, slot: int) -> None:
        self._waiting.pop(slot, None)
        self._in_flight.pop(slot, None)

    @property
    def waiting(self) -> int:
        """Requests whose prompts have not been read to their ends."""
        return len(self._waiting)

    @property
    def rows_left(self) -> int:
        """Prompt tokens that have not run all their loops."""
        return sum(resident.prompt_tokens - resident.written_tokens for resident in self._waiting.values())

    @property
    def is_under_way(self) -> bool:
        """A chunk has run some of its loops."""
        return any(chunk.depth for chunk in self._in_flight.values())

    def can_run(self) -> bool:
        return bool(self._in_flight) or any(not resident.is_starved for resident in self._waiting.values())

    def take(self, budget_rows: int, *, may_start: bool = True) -> list[Chunk]:
        """The chunks of the next tick. Requests join in order of arrival while the budget has room.

        Without `may_start` only those in flight go on.
        """
        room = budget_rows - sum(chunk.count for chunk in self._in_flight.values()) if may_start else 0
        head = next((resident for resident in self._waiting.values() if not resident.is_starved), None)
        quick = self._quick(head) if room > 0 and head is not None else set()
        for slot, resident in self._waiting.items():
            if room <= 0 or len(self._in_flight) == self._most_chunks:
                break
            if slot in self._in_flight or resident.is_starved:
                continue
            if quick and resident is not head and slot not in quick:
                continue
            first = resident.written_tokens
            until = min(resident.prompt_tokens, resident.limit_tokens)
            most = _shared_rows(budget_rows, first) if quick and resident is head else room
            count = 1 if self._is_serial else min(room, most, until - first)
            self._in_flight[slot] = Chunk(resident, first, count)
            room -= count
        return list(self._in_flight.values())

    def _quick(self, head: Resident) -> set[int]:
        """Slots of prompts that are much shorter than what the first one has still to read."""
        most = (head.prompt_tokens - head.written_tokens) // QUICK
        waiting = self._waiting.items()
        return {slot for slot, other in waiting if other.prompt_tokens - other.written_tokens <= most}

    def advance(self, chunks: Iterable[Chunk], loops: int) -> list[Chunk]:
        """One loop is done: returns the chunks that have finished their last, whose rows now hold KV."""
        finished = []
        for chunk in chunks:
            chunk.depth += 1
            if chunk.depth < loops:
                continue
            finished.append(chunk)
            del self._in_flight[chunk.resident.slot]
            chunk.resident.written_tokens = chunk.end
            if chunk.ends_prompt:
                del self._waiting[chunk.resident.slot]
        return finished


def _shared_rows(budget_rows: int, context_tokens: int) -> int:
    """Rows after `context_tokens` of context that take about half as long as `budget_rows` after none."""
    half = max(1, budget_rows // 2)
    return max(min(LEAST_ROWS, half), int(half / (1 + context_tokens / EVEN_TOKENS)))
