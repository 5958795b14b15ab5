"""Ticks on their way, and what comes back from them.

Owns the form in which a device tick leaves its results (`ResultColumns`), their copies to the host, and their reading
once the tick is complete. It must not know slots' tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from epicycle.engine.errors import TickError
from epicycle.engine.route import Resident
from epicycle.engine.tick import PromptScores, Samples, TickResult
from epicycle.engine.upload import download

_SAMPLE_COLUMNS = 5  # candidate, token, depth, is finite, is stop


@dataclass(frozen=True, slots=True)
class Reports:
    """Logprobs of the samples, in their order: [M] and [M, K] each, on the device or, later, on the host."""

    logprob: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def first(self, alternatives: int) -> Reports:
        return Reports(self.logprob, self.top_ids[:, :alternatives], self.top_logprobs[:, :alternatives])

    def copied(self) -> Reports:
        return Reports(download(self.logprob), download(self.top_ids), download(self.top_logprobs))


@dataclass(frozen=True, slots=True)
class ScoreParts:
    """Scores of one prompt chunk in pieces, each (logprobs, top ids, top logprobs, rows are finite)."""

    scores: PromptScores
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def add(self, logprob: Tensor, top_ids: Tensor, top_logprobs: Tensor, is_finite: Tensor) -> None:
        """One more piece, from here on its way to the host."""
        self.parts.append((download(logprob), download(top_ids), download(top_logprobs), download(is_finite)))

    def read(self) -> PromptScores:
        for logprob, top_ids, top_logprobs, is_finite in self.parts:
            self.scores.is_finite &= bool(is_finite.all())
            self.scores.logprobs.extend(logprob.tolist())
            self.scores.top_ids.extend(top_ids.flatten().tolist())
            self.scores.top_logprobs.extend(top_logprobs.flatten().tolist())
        return self.scores


class ResultColumns:
    """Where a tick writes its results, at a fixed address: [2 B] int64 (loops run, has left) of B decode rows, then,
    where it reads out, the number of samples and [5, M] of the M candidates, samples first."""

    def __init__(self, decode_rows: int, candidates: int, device: torch.device) -> None:
        self._flags = 2 * decode_rows
        size = self._flags + 1 + _SAMPLE_COLUMNS * candidates
        self._device: Tensor = torch.zeros(size, dtype=torch.int64, device=device)

    def of_rows(self, decode_rows: int) -> Tensor:
        """[2 B]"""
        return self._device[: 2 * decode_rows]

    def of_samples(self, candidates: int) -> Tensor:
        """[1 + 5 M]"""
        return self._device[self._flags : self._flags + 1 + _SAMPLE_COLUMNS * candidates]

    def write_rows(self, ran: Tensor, left: Tensor) -> None:
        self.of_rows(len(ran)).copy_(torch.cat((ran, left.to(torch.int64))))

    def write_samples(self, count: Tensor, columns: list[Tensor]) -> None:
        flat = torch.cat((count.to(torch.int64), *(column.to(torch.int64) for column in columns)))
        self.of_samples(len(columns[0])).copy_(flat)

    def to_host(self, decode_rows: int, candidates: int) -> tuple[Tensor, Tensor | None]:
        """Copies on their way to the host: [2, decode_rows], and [1 + 5 M] where there are candidates."""
        flags = download(self.of_rows(decode_rows)).view(2, decode_rows)
        return flags, download(self.of_samples(candidates)) if candidates else None


@dataclass(frozen=True, slots=True)
class DeviceTicket:
    """Meets `tick.Ticket`. `candidates` are the residents that may have sampled, by candidate number; None pads."""

    decode_rows: int
    candidates: list[Resident | None]
    flags: Tensor
    samples: Tensor | None
    reports: Reports | None
    scores: list[ScoreParts]
    event: torch.cuda.Event | None

    def is_complete(self) -> bool:
        if self.event is None:
            return True
        try:
            return bool(self.event.query())  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise TickError("device_failed", f"the GPU failed in a tick: {error}") from error

    def result(self) -> TickResult:
        ran, left = self.flags[:, : self.decode_rows].tolist()
        samples = self._read_samples() if self.samples is not None else None
        return TickResult(ran, [bool(flag) for flag in left], samples, [parts.read() for parts in self.scores])

    def _read_samples(self) -> Samples | None:
        assert self.samples is not None
        count = int(self.samples[0])
        if not count:
            return None
        columns = self.samples[1:].view(_SAMPLE_COLUMNS, -1)[:, :count].tolist()
        candidate, tokens, depths, is_finite, is_stop = columns
        residents = [self.candidates[number] for number in candidate]
        reports = self.reports
        return Samples(
            [resident for resident in residents if resident is not None],
            tokens=tokens,
            depths=depths,
            is_finite=[bool(flag) for flag in is_finite],
            is_stop=[bool(flag) for flag in is_stop],
            logprobs=reports.logprob[:count].tolist() if reports else [],
            top_ids=reports.top_ids[:count].tolist() if reports else [],
            top_logprobs=reports.top_logprobs[:count].tolist() if reports else [],
        )


def record(device: torch.device) -> torch.cuda.Event | None:
    """An event behind everything launched so far; None where work is complete when it returns."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def fence(device: torch.device) -> Callable[[], bool]:
    """Asks whether all that was launched so far is complete; any thread may."""
    event = record(device)
    return (lambda: True) if event is None else event.query
