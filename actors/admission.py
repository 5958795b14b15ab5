"""Admission: takes requests in, keeps them in a bounded queue, and lets them go on when there is room.

Owns the waiting queue, deadlines, and the answer to everyone who will never run. It must not know pages by number,
slots or plans: the scheduler says what is free (Room) and who has left (Left).
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable

from epicycle.actors import refusals
from epicycle.actors.admission_policy import PassLimits, admission_pass, order_key
from epicycle.actors.control_messages import (
    Admit,
    Again,
    ExecutorDown,
    ExecutorUp,
    GatewayLost,
    Left,
    Pressed,
    Published,
    Room,
    StartDrain,
    ToAdmission,
    ToScheduler,
    Withdraw,
)
from epicycle.actors.inbox import Inbox
from epicycle.actors.prefix_policy import prefix_policy
from epicycle.actors.routes import Choice, Route, Routes, UnitView
from epicycle.actors.time_limits import TimeLimits
from epicycle.actors.waiting import Entry, WaitingQueue
from epicycle.kvstore.reserve import ReserveRule
from epicycle.transport.config import Config
from epicycle.transport.wire.control import Capabilities
from epicycle.transport.wire.request import Cancel, Rejected, Submit, Verdict

EARLY_CANCELS = 4096
DEPARTURES = 32
RETRY_AFTER_MAX_S = 60
Answer = Callable[[int, Verdict], None]  # gateway number, verdict
MakeRule = Callable[[Capabilities], ReserveRule]


class Admission:
    """One inbox (`inbox`), turned by `turn`. `answer` sends a verdict to a gateway.

    `unit` finds what may be asked about the executor of an epoch at any time.
    """

    def __init__(
        self,
        config: Config,
        clock: Callable[[], float],
        to_scheduler: Callable[[ToScheduler], None],
        answer: Answer,
        make_rule: MakeRule,
        unit: Callable[[int], UnitView],
    ) -> None:
        self.inbox: Inbox[ToAdmission] = Inbox("admission")
        self.progress = 0
        self.rejections: Counter[str] = Counter()
        self.stale_messages = 0
        self._config = config
        self._clock = clock
        self._to_scheduler = to_scheduler
        self._answer = answer
        self._make_rule = make_rule
        self._limits = PassLimits(config.scheduler.scan_limit, config.scheduler.max_bypasses)
        self._routes = Routes(unit, config.transfer.least_tokens)
        self._waiting = WaitingQueue()
        self._running: dict[int, str] = {}  # by rid: why it was withdrawn, empty while it wasn't
        self._computing: dict[bytes, int] = {}  # landmarks of the prompts being computed -> by whom
        self._landmarks_of: dict[int, tuple[bytes, ...]] = {}  # the same by rid
        self._time_limits = TimeLimits(config)
        # A Cancel has a socket of its own and may overtake its Submit; it is remembered until that comes.
        self._early_cancels: OrderedDict[int, str] = OrderedDict()
        self._departures: deque[float] = deque(maxlen=DEPARTURES)
        self._is_draining = False
        self._is_pressed = False  # the scheduler knows of somebody who finds no room
        self._is_dirty = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def turn(self) -> None:
        """Handle what has come, enforce deadlines, and admit whom there is room for."""
        for message in self.inbox.take():
            self._handle(message)
        self._expire()
        if self._is_dirty:
            self._is_dirty = False
            self._admit()

    def _handle(self, message: ToAdmission) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Cancel(rid=rid, cause=cause):
                self._cancel(rid, cause)
            case Published(rid=rid):
                self._computed(rid)
                self._is_dirty = True
            case Left(rid=rid):
                self._computed(rid)
                self._running.pop(rid, None)
                self._departures.append(self._clock())
            case Again(submit=submit, arrived_s=arrived_s):
                self._run_again(submit, arrived_s)
            case Room():
                self._is_dirty |= self._routes.update(message)
            case ExecutorUp(epoch=epoch, facts=facts, role=role):
                prefix = prefix_policy(self._config, facts)
                self._routes.add(Route(epoch, facts, self._make_rule(facts), prefix, role))
            case ExecutorDown(epoch=epoch, reason=reason):
                self._lose_executor(epoch, reason)
            case GatewayLost(number=number):
                for entry in self._waiting.entries():
                    if entry.submit.gateway == number:
                        self._waiting.remove(entry.submit.rid)
                self._is_dirty = True
            case StartDrain():
                self._is_draining = True
                self._refuse_waiting(refusals.draining)
            case _:
                raise AssertionError(f"no handler for {type(message).__name__}")

    def _submit(self, submit: Submit) -> None:
        self.progress += 1
        if submit.rid in self._waiting or submit.rid in self._running:
            self.stale_messages += 1
            return
        cause = self._early_cancels.pop(submit.rid, None)
        refusal = refusals.cancelled(submit.rid, cause) if cause is not None else self._refusal(submit)
        if refusal is not None:
            self._reject(submit.gateway, refusal)
            return
        now_s = self._clock()
        self._enqueue(submit, now_s)
        self._time_limits.submitted(submit, now_s)

    def _enqueue(self, submit: Submit, arrived_s: float, *, is_local: bool = False) -> None:
        route = self._routes.first
        pages = route.rule.first_pages(len(submit.prompt) // 4, max(1, submit.sampling.max_tokens))
        order = order_key(submit.priority, arrived_s, self._config.scheduler.ageing_s)
        keys, most_hits = route.prefix.keys(submit), route.prefix.most_hits(submit)
        self._waiting.add(submit, arrived_s, pages, order, keys, most_hits, is_local=is_local)
        self._is_dirty = True

    def _run_again(self, submit: Submit, arrived_s: float) -> None:
        """Its place in the queue is the one it had; it may have been cancelled, or its time may have passed."""
        self._computed(submit.rid)
        cause = self._running.pop(submit.rid)
        refusal = refusals.withdrawn(submit.rid, cause, "") if cause else self._refusal(submit)
        if refusal is not None:
            self._reject(submit.gateway, refusal)
            return
        self._enqueue(submit, arrived_s, is_local=True)

    def _refusal(self, submit: Submit) -> Rejected | None:
        """Why this request can't even wait; None when it can."""
        if self._is_draining:
            return refusals.draining(submit.rid)
        if not self._routes.are_open:
            return refusals.not_ready(submit.rid)
        refusal = self._routes.refusal(submit)
        if refusal is not None:
            return refusal
        most = self._config.scheduler.max_waiting
        if len(self._waiting) >= most:
            return refusals.overloaded(submit.rid, len(self._waiting), most, self._retry_after_s())
        return None

    def _retry_after_s(self) -> int:
        """Time to serve those that wait, at the rate at which requests have left lately."""
        if len(self._departures) < 2:
            return 1
        rate = len(self._departures) / max(1e-3, self._clock() - self._departures[0])
        return min(RETRY_AFTER_MAX_S, max(1, math.ceil(len(self._waiting) / rate)))

    def _cancel(self, rid: int, cause: str) -> None:
        entry = self._waiting.remove(rid)
        if entry is not None:
            self._reject(entry.submit.gateway, refusals.cancelled(rid, cause))
            self._is_dirty = True
        elif rid in self._running:
            self._withdraw(rid, "shutdown" if cause == "shutdown" else "cancelled", "")
        else:
            self._early_cancels[rid] = cause
            if len(self._early_cancels) > EARLY_CANCELS:
                self._early_cancels.popitem(last=False)

    def _withdraw(self, rid: int, reason: str, message: str) -> None:
        self._running[rid] = reason
        self._to_scheduler(Withdraw(rid, reason, message))

    def _expire(self) -> None:
        now_s = self._clock()
        for rid, limit in self._time_limits.over(now_s):
            entry = self._waiting.remove(rid) if limit.covers != "generation" else None
            if entry is not None:
                waited_ms = (now_s - entry.arrived_s) * 1e3
                self._reject(entry.submit.gateway, refusals.timeout(rid, waited_ms, limit.ms, limit.knob))
                self._is_dirty = True
            elif rid in self._running and limit.covers != "queue":
                self._withdraw(rid, "deadline", f"{limit.ms / 1e3:g} s have passed, the limit of {limit.knob}")

    def _admit(self) -> None:
        """One pass of the policy; what it picks goes to the scheduler."""
        if not self._waiting or not self._routes.are_open:
            self._press(None)
            return
        head = self._ready(self._waiting.head(self._limits.scan_limit))
        taken: dict[int, Choice] = {}

        def take(position: int) -> bool:
            choice = self._routes.take(head[position])
            if choice is not None:
                taken[position] = choice
            return choice is not None

        bypasses = [entry.bypasses for entry in head]
        result = admission_pass(take, lambda: self._routes.are_full, bypasses, self._limits)
        for position, passed in result.bypassed:
            head[position].bypasses += passed
        for position in result.admitted:
            self._let_in(head[position], taken[position])
        self._press(head[0] if head and 0 not in taken else None)
        self._is_dirty = bool(result.admitted)  # one pass looks at a bounded part of the queue

    def _press(self, entry: Entry | None) -> None:
        """Whoever is first and finds no room may be worth more than one that runs; None: nobody is."""
        if entry is not None:
            self._to_scheduler(Pressed(entry.rank, entry.pages, entry.most_tokens, entry.keys, entry.most_hits))
        elif self._is_pressed:
            self._to_scheduler(Pressed())
        self._is_pressed = entry is not None

    def _ready(self, head: list[Entry]) -> list[Entry]:
        """All but those who should wait for a prompt that is being computed, or is about to be, and share it then.

        Prompts are computed in the order of their arrival, a chunk at a time, so waiting for one that begins with the
        same chunk costs no time, and waiting for an equal one little.
        """
        ready: list[Entry] = []
        ahead: set[bytes] = set()
        for entry in head:
            landmarks = self._landmarks(entry)
            if entry.most_hits and any(key in self._computing or key in ahead for key in landmarks):
                continue
            ahead.update(landmarks)
            ready.append(entry)
        return ready

    def _landmarks(self, entry: Entry) -> tuple[bytes, ...]:
        """Keys at the end of the first chunk and of the last full page that aren't cached yet."""
        keys, known = entry.keys, self._routes.known(entry.keys)
        if known == len(keys):
            return ()
        facts = self._routes.first.facts
        chunk_end = known + max(1, facts.prompt_chunk_tokens // facts.page_tokens)
        return (keys[chunk_end - 1], keys[-1]) if chunk_end < len(keys) else (keys[-1],)

    def _computed(self, rid: int) -> None:
        """`rid` doesn't compute its prompt any more."""
        for key in self._landmarks_of.pop(rid, ()):
            if self._computing.get(key) == rid:
                del self._computing[key]
                self._is_dirty = True

    def _let_in(self, entry: Entry, choice: Choice) -> None:
        rid = entry.submit.rid
        self._waiting.remove(rid)
        self._running[rid] = ""
        self._landmarks_of[rid] = self._landmarks(entry)
        self._computing |= dict.fromkeys(self._landmarks_of[rid], rid)
        now_s = self._clock()
        admit = Admit(
            submit=entry.submit,
            executor_epoch=choice.target.epoch,
            arrived_s=entry.arrived_s,
            queue_ms=(now_s - entry.arrived_s) * 1e3,
            pages=entry.pages,
            keys=entry.keys,
            most_hits=entry.most_hits,
            source_epoch=choice.source.epoch if choice.source is not None else 0,
            rank=entry.rank,
        )
        self._to_scheduler(admit)
        self._time_limits.started(rid, now_s)
        self.progress += 1

    def _lose_executor(self, epoch: int, reason: str) -> None:
        """The others go on; without any, nobody knows when there will be one, so nobody waits."""
        self._routes.remove(epoch)
        if not self._routes.are_open:
            self._refuse_waiting(lambda rid: refusals.engine_lost(rid, reason))
            return
        for entry in self._waiting.entries():
            refusal = self._routes.refusal(entry.submit)
            if refusal is not None:  # only the lost one was large enough
                self._waiting.remove(entry.submit.rid)
                self._reject(entry.submit.gateway, refusals.engine_lost(entry.submit.rid, reason))
        self._is_dirty = True

    def _refuse_waiting(self, refuse: Callable[[int], Rejected]) -> None:
        for entry in self._waiting.entries():
            self._waiting.remove(entry.submit.rid)
            self._reject(entry.submit.gateway, refuse(entry.submit.rid))

    def _reject(self, gateway: int, refusal: Rejected) -> None:
        self.rejections[refusal.code] += 1
        self._answer(gateway, refusal)
