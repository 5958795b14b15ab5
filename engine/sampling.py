"""What a request asks of the sampler, and the per-slot columns that hold it on the device.

Owns `SamplingParams` (host), `SlotSampling` (resident tensors, written between ticks by the pump, their one owner) and
`SampleRows` (the same gathered for the rows of one draw). Knows no logits and no scheduling. Values were checked at
admission; what doesn't fit here is our own mistake.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from epicycle.engine.upload import upload

MAX_ALTERNATIVES: Final = 20

# Columns of the two packed tables, so that gathering a batch is two reads, and how many each has.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, REALS = range(7)
TOP_K, SEED, CHOICE, MIN_TOKENS, ALTERNATIVES, INTEGERS = range(6)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One choice of one request. Every default is neutral except temperature, where 1 leaves the logits as they are."""

    temperature: float = 1.0  # 0: the likeliest token, nothing random
    top_k: int = 0  # 0 or less: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0  # in [0, 2**64)
    choice: int = 0
    min_tokens: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop_ids: tuple[int, ...] = ()  # every id that ends the text, the model's EOS ids included unless ignored
    alternatives: int = 0  # likeliest tokens to report beside the chosen one, at most MAX_ALTERNATIVES

    @property
    def penalises(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSteps:
    """Which parts of the sampler a batch runs: host knowledge, fixed within a graph.

    Leaving a step out never changes the bits of a row that doesn't use it.
    """

    penalise: bool = True
    bias: bool = True
    hold_stops: bool = True
    draw: bool = True
    filter: bool = True
    alternatives: int = MAX_ALTERNATIVES  # width of the report; a row's own count may be lower


def steps_for(rows: Iterable[SamplingParams]) -> SamplerSteps:
    """The fewest steps that serve all of `rows`."""
    wanted = list(rows)
    return SamplerSteps(
        penalise=any(row.penalises for row in wanted),
        bias=any(row.logit_bias for row in wanted),
        hold_stops=any(row.min_tokens > 0 for row in wanted),
        draw=any(row.temperature > 0 for row in wanted),
        filter=any(row.temperature > 0 and row.filters for row in wanted),
        alternatives=max((row.alternatives for row in wanted), default=0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRows:
    """M rows about to get a token. Ids that pad a list equal V, the vocabulary's size."""

    temperature: Tensor  # [M] float32, and so are the next five
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    top_k: Tensor  # [M] int64, and so are the next four
    seed: Tensor  # the bits of a uint64
    choice: Tensor
    min_tokens: Tensor
    alternatives: Tensor
    bias_ids: Tensor  # [M, B] int64, distinct apart from padding
    bias_values: Tensor  # [M, B] float32, 0 at padding
    stop_ids: Tensor  # [M, S] int64
    positions: Tensor  # [M] int64, where the new token will stand
    generated: Tensor  # [M] int64, tokens this choice has already
    output_counts: Tensor | None  # [M, V] int32; None where no row penalises
    prompt_seen: Tensor | None  # [M, V] bool


class SlotSampling:
    """Sampling columns of all slots on one device."""

    def __init__(self, slots: int, vocab_size: int, bias_cap: int, stop_cap: int, device: str = "cpu") -> None:
        self.vocab_size = vocab_size
        neutral = SamplingParams(temperature=0.0)  # slots nobody has taken pad batches
        reals = torch.tensor(_real_columns(neutral), dtype=torch.float32, device=device)
        integers = torch.tensor(_integer_columns(neutral), dtype=torch.int64, device=device)
        self.reals = reals.repeat(slots, 1)
        self.integers = integers.repeat(slots, 1)
        self.bias_ids = torch.full((slots, bias_cap), vocab_size, dtype=torch.int64, device=device)
        self.bias_values = torch.zeros(slots, bias_cap, dtype=torch.float32, device=device)
        self.stop_ids = torch.full((slots, stop_cap), vocab_size, dtype=torch.int64, device=device)
        self.output_counts = torch.zeros(slots, vocab_size, dtype=torch.int32, device=device)
        self.prompt_seen = torch.zeros(slots, vocab_size, dtype=torch.bool, device=device)

    def write(
        self, slot: int, params: SamplingParams, prompt_ids: Sequence[int] = (), output_ids: Sequence[int] = ()
    ) -> None:
        """Take a slot for a choice that has `output_ids` already. Between ticks only: it copies from the host."""
        self.reals[slot] = self._uploaded(_real_columns(params), torch.float32)
        self.integers[slot] = self._uploaded(_integer_columns(params), torch.int64)
        self.bias_ids[slot] = self._padded_ids(list(params.logit_bias), self.bias_ids.shape[1])
        values = list(params.logit_bias.values())
        padding = [0.0] * (self.bias_ids.shape[1] - len(values))
        self.bias_values[slot] = self._uploaded(values + padding, torch.float32)
        self.stop_ids[slot] = self._padded_ids(list(params.stop_ids), self.stop_ids.shape[1])
        if params.penalises:
            self._write_history(slot, prompt_ids, output_ids)

    def _padded_ids(self, ids: list[int], width: int) -> Tensor:
        assert len(ids) <= width, f"{len(ids)} ids for {width} places"
        return self._uploaded(ids + [self.vocab_size] * (width - len(ids)), torch.int64)

    def _uploaded(self, values: Sequence[int] | Sequence[float], dtype: torch.dtype) -> Tensor:
        return upload(values, dtype, self.reals.device)

    def _write_history(self, slot: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        prompt, output = self._uploaded(prompt_ids, torch.int64), self._uploaded(output_ids, torch.int64)
        self.prompt_seen[slot].zero_().index_fill_(0, prompt, True)
        self.output_counts[slot].zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def gather(self, slots: Tensor, positions: Tensor, generated: Tensor, steps: SamplerSteps) -> SampleRows:
        """The rows of `slots` [M] int64."""
        reals = self.reals.index_select(0, slots).unbind(1)
        integers = self.integers.index_select(0, slots).unbind(1)
        return SampleRows(
            temperature=reals[TEMPERATURE],
            top_p=reals[TOP_P],
            min_p=reals[MIN_P],
            repetition_penalty=reals[REPETITION],
            presence_penalty=reals[PRESENCE],
            frequency_penalty=reals[FREQUENCY],
            top_k=integers[TOP_K],
            seed=integers[SEED],
            choice=integers[CHOICE],
            min_tokens=integers[MIN_TOKENS],
            alternatives=integers[ALTERNATIVES],
            bias_ids=self.bias_ids.index_select(0, slots),
            bias_values=self.bias_values.index_select(0, slots),
            stop_ids=self.stop_ids.index_select(0, slots),
            positions=positions,
            generated=generated,
            output_counts=self.output_counts.index_select(0, slots) if steps.penalise else None,
            prompt_seen=self.prompt_seen.index_select(0, slots) if steps.penalise else None,
        )

    def count(self, slots: Tensor, tokens: Tensor, is_live: Tensor) -> None:
        """Add the tokens [M] of the rows that are live [M] bool to their slots' counts, in place, inside the tick."""
        places = slots * self.vocab_size + tokens
        self.output_counts.view(-1).index_add_(0, places, is_live.to(torch.int32))


def _real_columns(params: SamplingParams) -> list[float]:
    columns = [0.0] * REALS
    columns[TEMPERATURE], columns[TOP_P], columns[MIN_P] = params.temperature, params.top_p, params.min_p
    columns[REPETITION] = params.repetition_penalty
    columns[PRESENCE], columns[FREQUENCY] = params.presence_penalty, params.frequency_penalty
    return columns


def _integer_columns(params: SamplingParams) -> list[int]:
    assert 0 <= params.seed < 2**64
    assert 0 <= params.alternatives <= MAX_ALTERNATIVES
    columns = [0] * INTEGERS
    columns[TOP_K], columns[CHOICE], columns[MIN_TOKENS] = params.top_k, params.choice, params.min_tokens
    columns[SEED] = params.seed - 2**64 if params.seed >= 2**63 else params.seed
    columns[ALTERNATIVES] = params.alternatives
    return columns
