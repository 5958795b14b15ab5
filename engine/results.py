"""What a tick that is complete means for its requests: their accounts, and the messages about them.

Owns what is said of tokens, prompt scores and ends, and when a token or a lease ends its request. Whose slot is freed
then, and when, is the pump's: it is told by `end`. It must not know plans, slots' tensors or ticks on their way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from epicycle.engine.flight import Launched
from epicycle.engine.outbox import Outbox
from epicycle.engine.route import Resident
from epicycle.engine.tick import PromptScores, Samples, TickResult
from epicycle.transport.wire.output import POOL_WARNING, Fin


class EndRequest(Protocol):
    def __call__(
        self, resident: Resident, reason: str, *, code: str = "", message: str = "", warning: str = ""
    ) -> None:
        """Send the request's terminal, by `say_end`, and free its slot."""
        ...


class Results:
    """`loops` is the model's depth; a resident that `is_resident` denies has ended meanwhile."""

    def __init__(
        self,
        out: Outbox,
        loops: int,
        is_resident: Callable[[Resident], bool],
        end: EndRequest,
        clock: Callable[[], float],
    ) -> None:
        self._out = out
        self._counters = out.counters
        self._loops = loops
        self._is_resident = is_resident
        self._end = end
        self._clock = clock

    def take(self, launched: Launched, result: TickResult) -> None:
        """Bring the host's accounts up to date, then pass on what was scored and sampled."""
        for resident, ran, leaves in zip(launched.work.decode, result.ran, result.leaves, strict=True):
            if not ran or not self._is_resident(resident):
                continue
            resident.loops_done = 0 if leaves else ran
            if leaves:
                self._counters.loops_saved += self._loops - ran
                resident.written_tokens += 1
        for score in result.scores:
            if self._is_resident(score.resident):
                self._pass_scores(score)
        if result.samples is not None:
            self._pass_samples(result.samples)
        for chunk in launched.finished:
            if self._is_resident(chunk.resident):
                self._after_chunk(chunk.resident, chunk.ends_prompt)

    def moved(self, resident: Resident) -> None:
        """The next report tells how many of its positions hold KV."""
        self._out.moved[resident.slot] = (resident.join.gen, resident.written_tokens)

    def _after_chunk(self, resident: Resident, ends_prompt: bool) -> None:
        self.moved(resident)
        if ends_prompt and resident.join.sampling.max_tokens == 0 and resident.join.exports is None:
            self._end(resident, "length")
        elif not ends_prompt:
            self._after_step(resident)

    def _pass_scores(self, scores: PromptScores) -> None:
        resident = scores.resident
        if not scores.is_finite:
            self._fail(resident, f"prompt token {scores.first}", self._loops)
        elif scores.logprobs:
            self._out.add_scores(resident.join, scores)

    def _pass_samples(self, samples: Samples) -> None:
        for place, resident in enumerate(samples.residents):
            if not self._is_resident(resident):
                continue  # evicted meanwhile, or its prompt scores have failed it
            if not samples.is_finite[place]:
                self._fail(resident, f"output {resident.outputs}", samples.depths[place])
                continue
            self._emit(resident, samples, place)
            self._judge(resident, samples.is_stop[place])

    def _emit(self, resident: Resident, samples: Samples, place: int) -> None:
        """Append one token to its gateway's batch, and count it."""
        self._out.add_token(resident.join, resident.outputs, samples, place)
        if not resident.outputs:
            resident.first_token_s = self._clock()
        resident.outputs += 1
        self._counters.generated_tokens += 1
        self.moved(resident)

    def _judge(self, resident: Resident, is_stop: bool) -> None:
        """Does this token end its request?"""
        if is_stop:
            self._end(resident, "stop")
        elif resident.outputs >= resident.join.sampling.max_tokens:
            self._end(resident, "length")
        else:
            self._after_step(resident)

    def _after_step(self, resident: Resident) -> None:
        """A row at the end of its lease waits for growth, or ends where the pool has no more to give."""
        if resident.is_starved and not (resident.is_final or resident.is_parked):
            self._counters.starved_latency += 1  # once a stall: how many ticks it lasts is not the row's doing
        self.end_if_dry(resident)

    def end_if_dry(self, resident: Resident) -> None:
        """End a row that waits for growth which will never come."""
        if resident.is_final and resident.is_starved:
            self._counters.starved_pool += 1
            self._end(resident, "length", warning=POOL_WARNING)

    def _fail(self, resident: Resident, what: str, depth: int) -> None:
        self._out.moved.pop(resident.slot, None)  # nobody should share what made it fail
        message = f"request {resident.join.rid}: the logits of {what} are not finite at depth {depth}"
        self._end(resident, "error", code="server_error", message=message)

    def say_end(self, resident: Resident, reason: str, *, code: str = "", message: str = "", warning: str = "") -> None:
        """Tell its gateway that the request has ended."""
        now_s = self._clock()
        first_s = resident.first_token_s or now_s
        fin = Fin(
            epoch=self._out.epoch,
            rid=resident.join.rid,
            reason=reason,
            tokens=resident.outputs,
            code=code,
            message=message,
            warning=warning,
            queue_ms=resident.join.queue_ms,
            prefill_ms=(first_s - resident.joined_s) * 1e3,
            decode_ms=(now_s - first_s) * 1e3,
        )
        self._out.ends.setdefault(resident.join.gateway, []).append(fin)
