"""Messages of the ticks that are complete: a token batch for each gateway, prompt scores, ends, and the report.

Owns their columns and their order: within a gateway, what is said of prompts before tokens before ends, so that a
request's end comes after its last token. Emptied by every `take`. It must not know slots' tensors, or why a request
ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from epicycle.engine.tick import PromptScores, Samples
from epicycle.transport.tick_counters import TickCounters
from epicycle.transport.token_columns import TokenColumns
from epicycle.transport.wire.columns import F32, I32, pack
from epicycle.transport.wire.output import Fin, PrefixHit, PromptLogprobs, TokenBatch
from epicycle.transport.wire.plan import Join, StepReport
from epicycle.transport.wire.transfer import TransferFailure

Message = TokenBatch | PromptLogprobs | PrefixHit | Fin


@dataclass(slots=True)
class StepOutput:
    """The report for the scheduler, None when nothing changed, and messages by gateway number, in order."""

    report: StepReport | None = None
    to_gateways: dict[int, list[Message]] = field(default_factory=dict)


@dataclass(slots=True)
class Outbox:
    """What `collect` will hand over. `moved` maps slots to (gen, positions that hold KV)."""

    epoch: int
    control_epoch: int = 0
    plan_seq: int = 0
    is_report_due: bool = False
    counters: TickCounters = field(default_factory=TickCounters)
    moved: dict[int, tuple[int, int]] = field(default_factory=dict)
    freed: list[tuple[int, int]] = field(default_factory=list)
    saved: list[tuple[int, int, int]] = field(default_factory=list)  # slot, gen, positions that hold anything
    failed: list[TransferFailure] = field(default_factory=list)
    columns: dict[int, TokenColumns] = field(default_factory=dict)
    prompts: dict[int, list[PromptLogprobs | PrefixHit]] = field(default_factory=dict)
    ends: dict[int, list[Fin]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not (self._has_report or self.columns or self.prompts or self.ends)

    @property
    def _has_report(self) -> bool:
        return bool(self.is_report_due or self.moved or self.freed or self.saved or self.failed)

    def clear(self) -> None:
        """Drop everything not yet taken; the counters stay."""
        self.moved, self.freed, self.saved, self.failed = {}, [], [], []
        self.columns, self.prompts, self.ends = {}, {}, {}

    def add_hit(self, join: Join, tokens: int) -> None:
        self.prompts.setdefault(join.gateway, []).append(PrefixHit(self.epoch, join.rid, tokens))

    def add_scores(self, join: Join, scores: PromptScores) -> None:
        message = PromptLogprobs(
            epoch=self.epoch,
            rid=join.rid,
            first=scores.first,
            k=scores.k,
            logprobs=pack(F32, scores.logprobs),
            top_ids=pack(I32, scores.top_ids),
            top_logprobs=pack(F32, scores.top_logprobs),
        )
        self.prompts.setdefault(join.gateway, []).append(message)

    def add_token(self, join: Join, index: int, samples: Samples, place: int) -> None:
        """Output `index` of a request, sampled in `place`."""
        columns, k = self.columns.setdefault(join.gateway, TokenColumns()), join.sampling.logprobs
        columns.rids.append(join.rid)
        columns.first_index.append(index)
        columns.tokens.append(samples.tokens[place])
        columns.exit_depths.append(samples.depths[place])
        columns.logprob_k.append(k)
        if k >= 0:
            columns.logprobs.append(samples.logprobs[place])
            columns.top_ids.extend(samples.top_ids[place][:k])
            columns.top_logprobs.extend(samples.top_logprobs[place][:k])

    def take(self) -> StepOutput:
        """Everything since the last call."""
        to_gateways: dict[int, list[Message]] = {gateway: list(messages) for gateway, messages in self.prompts.items()}
        for gateway, columns in self.columns.items():
            to_gateways.setdefault(gateway, []).append(columns.pack(self.epoch))
        for gateway, ends in self.ends.items():
            to_gateways.setdefault(gateway, []).extend(ends)
        report = self._report() if self._has_report else None
        self.clear()
        self.is_report_due = False
        return StepOutput(report, to_gateways)

    def _report(self) -> StepReport:
        return StepReport(
            epoch=self.epoch,
            control_epoch=self.control_epoch,
            plan_seq=self.plan_seq,
            slots=pack(I32, self.moved),
            gens=pack(I32, [gen for gen, _ in self.moved.values()]),
            tokens=pack(I32, [tokens for _, tokens in self.moved.values()]),
            freed_slots=pack(I32, [slot for slot, _ in self.freed]),
            freed_gens=pack(I32, [gen for _, gen in self.freed]),
            saved_slots=pack(I32, [slot for slot, _, _ in self.saved]),
            saved_gens=pack(I32, [gen for _, gen, _ in self.saved]),
            saved_tokens=pack(I32, [tokens for _, _, tokens in self.saved]),
            failed=self.failed,
            **self.counters.report_fields(),
        )
