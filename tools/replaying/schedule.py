"""Who may be sent and when: the graph of rows, conversations within their number, rows read ahead of need.

Owns every row between being read and its end. Dependencies come before times: a row never starts before the rows it
waits for have ended. It takes the time as an argument, so that tests run it under a clock of their own, and reads no
more of the trace than `read_ahead` rows beyond what has ended. It must not know prompts or servers.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from epicycle.tools.replaying.errors import Faults, TraceError
from epicycle.tools.replaying.formats.base import Numbered
from epicycle.tools.replaying.sessions import Session, Sessions, size_of
from epicycle.tools.replaying.timing import Arrivals, Timing
from epicycle.transport.trace_rows import TraceRow, TraceRowError

READ_AHEAD = 10_000
READ_AHEAD_BYTES = 256 << 20
REMEMBERED = 1 << 18  # ids of rows that have ended; who waits for an older one waits for nobody known


@dataclass(eq=False)
class Held:
    """A row on its way. `missing` are the rows it still waits for, `following` those that wait for it.

    `due_ms` is when it may go, `granted_ms` when its conversation had its turn too.
    """

    id: str
    line: int
    row: TraceRow
    session: Session
    turn: int = 0
    parent: str = ""
    stamp_ms: float | None = None
    wait_ms: float = 0.0
    size: int = 0
    missing: set[str] = field(default_factory=set)
    following: list[Held] = field(default_factory=list)
    has_parents: bool = False
    due_ms: float = 0.0
    granted_ms: float = 0.0
    is_due: bool = False
    is_sent: bool = False


class Schedule:
    """Rows in, rows that are due out. `concurrency` bounds conversations under way; 0 doesn't.

    `read_ahead` bounds the rows held, and about so many bytes of prompts bound them too.
    """

    def __init__(
        self,
        rows: Iterator[Numbered],
        timing: Timing,
        faults: Faults,
        *,
        concurrency: int = 0,
        stops_sessions: bool = True,
        read_ahead: int = READ_AHEAD,
    ) -> None:
        self.sessions = Sessions()
        self.skipped: list[Held] = []  # rows that will never be sent, for whoever records them
        self.rows_read = 0
        self.is_at_end = False
        self._rows = rows
        self._arrivals = Arrivals(timing)
        self._faults = faults
        self._concurrency = concurrency
        self._stops_sessions = stops_sessions
        self._read_ahead = read_ahead
        self._held: dict[str, Held] = {}
        self._ended: OrderedDict[str, bool] = OrderedDict()  # id -> whether it ended well
        self._awaited: dict[str, list[Held]] = {}  # ids that weren't read yet -> rows that wait for them
        self._branched: dict[str, list[str]] = {}  # ids that weren't read yet -> rows that name them as branches
        self._due: list[tuple[float, int, str]] = []
        self._queue: list[tuple[int, int, Session]] = []  # they have rows that are due, and wait for their turn
        self._under_way = 0  # conversations with a slot
        self._sent = 0
        self._number = 0
        self._bytes = 0

    @property
    def is_done(self) -> bool:
        return self.is_at_end and not self._held

    @property
    def sent(self) -> int:
        """Rows in flight."""
        return self._sent

    @property
    def held(self) -> int:
        return len(self._held)

    @property
    def next_due_ms(self) -> float | None:
        """When `take` is worth another call, if nothing ends before."""
        return self._due[0][0] if self._due else None

    def read(self, now_ms: float = 0.0, most: int | None = None) -> None:
        """Read ahead, at most `most` rows now. Raises TraceError for rows and graphs that can't be used."""
        while not self.is_at_end and self._has_room() and most != 0:
            most = most if most is None else most - 1
            numbered = next(self._rows, None)
            if numbered is None:
                self.is_at_end = True
                self._end_of_trace()
            else:
                self.rows_read += 1
                self._add(numbered, now_ms)

    def _has_room(self) -> bool:
        return not self._held or (len(self._held) < self._read_ahead and self._bytes < READ_AHEAD_BYTES)

    def take(self, now_ms: float) -> list[Held]:
        """The rows to be sent now. Raises TraceError where nothing can ever move again."""
        taken = []
        while self._due and self._due[0][0] <= now_ms:
            _, number, name = heapq.heappop(self._due)
            held = self._held.get(name)
            if held is None:
                continue
            session = held.session
            if session.has_slot or not self._is_full():
                taken += self._send([name], held.due_ms) + self._send(session.queued, now_ms)
            else:
                heapq.heappush(self._queue, (session.order, number, session))
                session.queued.append(name)
        while self._queue and not self._is_full():
            taken += self._send(heapq.heappop(self._queue)[2].queued, now_ms)
        if self._held and not self._sent and not self._due and not self._queue:
            self._resolve_stall()
        return taken

    def ended(self, held: Held, now_ms: float, *, is_ok: bool) -> None:
        """`held`, sent before, has ended. Rows that waited for it are due from now on."""
        self._sent -= 1
        if not is_ok and self._stops_sessions:
            held.session.is_stopped = True
        self._close(held, now_ms, is_ok)
        self._rest(held.session)
        self.sessions.leave(held.session)

    def _is_full(self) -> bool:
        return 0 < self._concurrency <= self._under_way

    def _send(self, names: list[str], granted_ms: float) -> list[Held]:
        """Those of a conversation's rows that may still go, now that it has its turn; empties `names`."""
        sent = []
        for held in filter(None, map(self._held.get, names)):
            if held.session.is_stopped:
                self._drop(held)
                continue
            if not held.session.has_slot:
                held.session.has_slot = True
                self._under_way += 1
            held.granted_ms, held.is_sent = granted_ms, True
            self._sent += 1
            sent.append(held)
        names.clear()
        return sent

    def _add(self, numbered: Numbered, now_ms: float) -> None:
        line, row = numbered
        name = row.request_id or f"#{self.rows_read}"
        if name in self._held or (row.request_id and name in self._ended):
            self._faults.bad(TraceError(f"{name!r} appears twice", line=line, field="request_id"))
            return
        if name in (row.wait_for or ()):
            self._faults.bad(TraceError(f"{name!r} waits for itself", line=line, field="wait_for"))
            return
        try:
            stamp_ms, wait_ms = self._arrivals.stamp(row), self._arrivals.wait(row)
        except TraceRowError as error:
            self._faults.bad(TraceError(str(error), line=line, field=error.field))
            return
        session = self.sessions.of(row.session_id)
        held = Held(name, line, row, session, session.turns, stamp_ms=stamp_ms, wait_ms=wait_ms, size=size_of(row))
        self._bytes += held.size
        parents = [session.last_id] if row.wait_for is None and session.last_id else list(row.wait_for or ())
        parents = list(dict.fromkeys(parents + self._branched.pop(name, [])))
        held.parent = self._history_of(session, parents)
        session.turns += 1
        session.last_id = name
        self._held[name] = held
        lost = [self._wait(held, parent) for parent in parents]
        self._name_branches(held)
        for waiting in self._awaited.pop(name, []):
            held.following.append(waiting)
        if any(lost) or session.is_stopped:
            self._drop(held)
        elif not held.missing:
            self._make_due(held, now_ms)

    def _history_of(self, session: Session, parents: list[str]) -> str:
        """The row whose conversation goes on: of several, the last one of the same session, else the first."""
        held = ((name, self._held.get(name)) for name in parents)
        own = [name for name, one in held if name == session.last_id or (one is not None and one.session is session)]
        return own[-1] if own else (parents[0] if parents else "")

    def _wait(self, held: Held, parent: str) -> bool:
        """Make `held` wait for `parent`. Whether it never can go, since the parent failed."""
        held.has_parents = True
        if parent in self._ended:
            return self._stops_sessions and not self._ended[parent]
        held.missing.add(parent)
        if parent in self._held:
            self._held[parent].following.append(held)
        else:
            self._awaited.setdefault(parent, []).append(held)
        return False

    def _name_branches(self, held: Held) -> None:
        for child in held.row.branches:
            other = self._held.get(child)
            if other is None and child not in self._ended:
                self._branched.setdefault(child, []).append(held.id)
                if len(self._branched) > self._read_ahead:
                    del self._branched[next(iter(self._branched))]
                    self._faults.skip("branches to rows that never came")
            elif other is not None and not other.is_sent and held.id not in other.missing and other is not held:
                self._undue(other)
                self._wait(other, held.id)

    def _undue(self, held: Held) -> None:
        """Take back that a row was due: a row behind it in the file names it as a branch."""
        if held.is_due:
            held.is_due = False
            self._due = [entry for entry in self._due if entry[2] != held.id]
            heapq.heapify(self._due)
            if held.id in held.session.queued:
                held.session.queued.remove(held.id)
            self._rest(held.session)

    def _make_due(self, held: Held, now_ms: float) -> None:
        row = held.row
        if not held.has_parents:
            held.due_ms = self._arrivals.root(held.stamp_ms)
        else:
            held.due_ms = now_ms + held.wait_ms
            if row.delay is None and held.stamp_ms is not None:
                held.due_ms = max(held.due_ms, held.stamp_ms)
        held.session.live += 1
        held.is_due = True
        self._number += 1
        heapq.heappush(self._due, (held.due_ms, self._number, held.id))

    def _close(self, held: Held, now_ms: float, is_ok: bool) -> None:
        """Out of the graph: those that waited for it are due, or never will be."""
        self._forget(held, is_ok)
        for follower in held.following:
            follower.missing.discard(held.id)
            if follower.id not in self._held or follower.is_sent:
                continue
            if self._stops_sessions and not is_ok:
                self._drop(follower)
            elif not follower.missing:
                self._make_due(follower, now_ms)

    def _drop(self, held: Held) -> None:
        """Never to be sent; nor is what waits for it. No recursion: chains may be as long as the trace."""
        doomed = [held]
        while doomed:
            one = doomed.pop()
            if one.id not in self._held or one.is_sent:
                continue
            one.session.is_stopped = True
            self._forget(one, is_ok=False)
            self.skipped.append(one)
            if one.is_due:
                self._rest(one.session)
            self.sessions.leave(one.session)
            doomed += one.following

    def _forget(self, held: Held, is_ok: bool) -> None:
        """Held no more; its end is remembered where a later row may wait for it."""
        del self._held[held.id]
        self._bytes -= held.size
        if held.row.request_id or held.session.name:
            self._ended[held.id] = is_ok
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def _rest(self, session: Session) -> None:
        """A row fewer is under way; without any the conversation gives its turn back."""
        session.live -= 1
        if not session.live and session.has_slot:
            session.has_slot = False
            self._under_way -= 1

    def _end_of_trace(self) -> None:
        """Nothing more will be read: rows that wait for what never came, or in a circle, are faults."""
        self._branched.clear()
        had_forward = bool(self._awaited) or any(one.missing for one in self._held.values())
        for name, waiting in list(self._awaited.items()):
            for held in waiting:
                text = f"{name!r} is no row of the trace"
                self._faults.bad(TraceError(text, line=held.line, field="wait_for"))
                self._drop(held)
        self._awaited.clear()
        if had_forward:
            self._refuse_circles()

    def _refuse_circles(self) -> None:
        """Rows that stay when everything that can end has ended; what isn't read yet counts as ended."""
        missing = {held.id: sum(name in self._held for name in held.missing) for held in self._held.values()}
        free = [held for held in self._held.values() if not missing[held.id]]
        while free:
            one = free.pop()
            missing.pop(one.id, None)
            for follower in one.following:
                if follower.id in missing:
                    missing[follower.id] -= 1
                    if not missing[follower.id]:
                        free.append(follower)
        if missing:
            stuck = sorted((self._held[name] for name in missing), key=lambda held: held.line)
            names = " -> ".join(one.id for one in stuck[:6])
            text = f"{len(stuck)} rows wait for each other or for such rows: {names}"
            self._faults.bad(TraceError(text, line=stuck[0].line, field="wait_for"))
            for held in stuck:
                self._drop(held)

    def _resolve_stall(self) -> None:
        """All held rows wait for rows beyond what may be read ahead."""
        self._refuse_circles()
        if self._held and not self._due:
            held = next(iter(self._held.values()))
            text = f"waits for a row more than {self._read_ahead} rows ahead (--read-ahead)"
            raise TraceError(text, line=held.line, field="wait_for")
