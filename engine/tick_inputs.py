"""What the host tells the device about a tick: which slots decode, which prompt rows ride along, which chunks end.

Owns the device buffers a tick reads them from (at fixed addresses, so that graphs can), the ladder of their sizes, and
the places of prompt rows' states between ticks. Uploads are in stream order and nobody waits for them. It must not
know what a row computes.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from epicycle.engine.route import Chunk, TickWork

MOST_CHUNKS = 32
# First prompt row, rows; last prompt row, its slot (the sink where no sample is due), state row and position
_CHUNK_COLUMNS = 6
_PROMPT_COLUMNS = 5  # slot, position, depth, end, state row
DECODE_RUNGS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 256)
BESIDE_RUNGS = (8, 16, 32, 48, 64, 96, 128, 256)  # of decode rows beside prompt rows, where a few more cost little
PROMPT_RUNGS = (128, 256, 512, 1024, 2048)

_Column = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class TickShape:
    """Rows of a tick as the device sees them, padding included."""

    decode_rows: int
    prompt_rows: int


@dataclass(frozen=True, slots=True)
class Ladder:
    """The sizes that ticks are padded to, each tuple ascending; `beside` are those of decode rows beside prompts.

    Products run fastest on so many rows as `prompt` names. So decode rows that are few take their places out of the
    prompt's rung, and both together make one.
    """

    decode: tuple[int, ...]
    prompt: tuple[int, ...]
    beside: tuple[int, ...]

    @classmethod
    def of(cls, slots: int, most_prompt_rows: int) -> Ladder:
        """Rungs up to `slots` decode rows and `most_prompt_rows` prompt rows, which are the last rungs."""
        decode = [rung for rung in DECODE_RUNGS if rung < slots]
        decode.extend(range(DECODE_RUNGS[-1] + 128, slots, 128))
        prompt = [rung for rung in PROMPT_RUNGS if rung < most_prompt_rows]
        beside = [rung for rung in BESIDE_RUNGS if rung < slots]
        return cls((*decode, slots), (*prompt, most_prompt_rows), (*beside, slots))

    def shape(self, decode_rows: int, prompt_rows: int) -> TickShape:
        """The smallest shape that holds so many rows; no rows take none."""
        decode = _rung(self.beside if prompt_rows else self.decode, decode_rows)
        return TickShape(decode, _rung(self.prompt_beside(decode), prompt_rows))

    def prompt_beside(self, decode_rung: int) -> tuple[int, ...]:
        """Rungs of prompt rows beside so many decode rows. The last one holds as many as prompts alone may have: rows
        that began to decode after a chunk set out don't stop it."""
        packed = {_beside(rung, decode_rung) for rung in self.prompt}
        return tuple(sorted(packed | {self.prompt[-1]}))

    def prompt_room(self, decode_rows: int, rows: int) -> int:
        """How many prompt rows fill a tick of some `rows` rows beside so many decode rows."""
        return _beside(_rung(self.prompt, min(rows, self.prompt[-1])), _rung(self.beside, decode_rows))

    def shapes(self) -> tuple[list[TickShape], list[TickShape], list[TickShape]]:
        """Decode rows alone, prompt rows alone, and both together."""
        decode = [TickShape(rows, 0) for rows in self.decode]
        prompt = [TickShape(0, rows) for rows in self.prompt]
        mixed = [TickShape(rows, beside) for rows in self.beside for beside in self.prompt_beside(rows)]
        return decode, prompt, mixed

    def row_counts(self) -> list[int]:
        """Every number of rows, padding included, that a tick may have."""
        return sorted({shape.decode_rows + shape.prompt_rows for shapes in self.shapes() for shape in shapes})


def _beside(prompt_rung: int, decode_rung: int) -> int:
    """What is left of a prompt's rung; all of it where decode rows would take more than a quarter."""
    return prompt_rung - decode_rung if 4 * decode_rung <= prompt_rung else prompt_rung


def _rung(rungs: tuple[int, ...], rows: int) -> int:
    return rungs[bisect_left(rungs, rows)] if rows else 0


class TickInputs:
    """Buffers on the device. `slot_sink` is the slot that padding points to; `state_sink` the state row."""

    def __init__(self, ladder: Ladder, slot_sink: int, device: torch.device) -> None:
        self.ladder = ladder
        self.state_rows = ladder.prompt[-1]
        self.state_sink = self.state_rows
        self._slot_sink = slot_sink
        self._device = device
        self._chunk_numbers = _CHUNK_COLUMNS * MOST_CHUNKS
        self._decode = torch.full((ladder.decode[-1],), slot_sink, dtype=torch.int64, device=device)
        size = self._chunk_numbers + _PROMPT_COLUMNS * self.state_rows
        self._prompt = torch.zeros(size, dtype=torch.int64, device=device)
        self._decode_slots: list[int] = []  # what the device has
        self.empty()

    def empty(self) -> None:
        """No chunk is in flight."""
        self._held: dict[int, _Column] = {}  # slot -> state rows of its chunk in flight
        self._free = list(range(self.state_rows))

    # Views that ticks read

    def decode_slots(self, rows: int) -> Tensor:
        """[rows]"""
        return self._decode[:rows]

    def prompt_table(self, rows: int) -> Tensor:
        """[5, rows]: slots, positions, depths, ends and state rows."""
        flat = self._prompt[self._chunk_numbers : self._chunk_numbers + _PROMPT_COLUMNS * rows]
        return flat.view(_PROMPT_COLUMNS, rows)

    def prompt_columns(self, rows: int) -> tuple[Tensor, ...]:
        """`prompt_table` column by column."""
        return self.prompt_table(rows).unbind(0)

    @property
    def chunks(self) -> Tensor:
        """[2, C]: first prompt row and count; see `Frame`."""
        return self._prompt[: 2 * MOST_CHUNKS].view(2, MOST_CHUNKS)

    @property
    def ends(self) -> tuple[Tensor, ...]:
        """Last prompt row, slot, state row and position, each [C], of chunks whose last row is sampled from; else the
        sinks."""
        flat = self._prompt[2 * MOST_CHUNKS : self._chunk_numbers]
        return flat.view(4, MOST_CHUNKS).unbind(0)

    # What the host writes

    def place(self, work: TickWork, loops: int) -> TickShape:
        """Upload the rows of a tick; `loops` is the depth at which prompts end. At most MOST_CHUNKS chunks."""
        shape = self.ladder.shape(len(work.decode), work.prompt_rows)
        self._place_decode([row.slot for row in work.decode], shape.decode_rows)
        if work.chunks:
            self._send(self._prompt, self._prompt_numbers(work.chunks, shape.prompt_rows, loops))
        return shape

    def place_padding(self, shape: TickShape) -> None:
        """Rows of a tick of this shape in which nobody is."""
        self._place_decode([], shape.decode_rows)
        self._send(self._prompt, self._prompt_numbers([], shape.prompt_rows, 0))

    def _place_decode(self, slots: list[int], rows: int) -> None:
        padded = slots + [self._slot_sink] * (rows - len(slots))
        if padded != self._decode_slots[:rows]:
            self._send(self._decode, np.array(padded, dtype=np.int64))
            self._decode_slots = padded + self._decode_slots[rows:]

    def _prompt_numbers(self, chunks: list[Chunk], rows: int, loops: int) -> _Column:
        numbers = np.zeros(self._chunk_numbers + _PROMPT_COLUMNS * rows, dtype=np.int64)
        table = numbers[: self._chunk_numbers].reshape(_CHUNK_COLUMNS, MOST_CHUNKS)
        columns = numbers[self._chunk_numbers :].reshape(_PROMPT_COLUMNS, rows)
        columns[0], columns[4] = self._slot_sink, self.state_sink
        table[3], table[4] = self._slot_sink, self.state_sink
        start = 0
        for place, chunk in enumerate(chunks):
            at = slice(start, start + chunk.count)
            held = self._hold(chunk)
            columns[0, at], columns[2, at], columns[3, at] = chunk.resident.slot, chunk.depth, chunk.end
            columns[1, at], columns[4, at] = np.arange(chunk.first, chunk.end), held
            table[0, place], table[1, place] = start, chunk.count
            if samples_at_end(chunk, loops):
                table[2:, place] = at.stop - 1, chunk.resident.slot, held[-1], chunk.end - 1
            start = at.stop
        for chunk in chunks:
            if chunk.depth + 1 == loops:
                self.drop(chunk.resident.slot)  # what this tick leaves there is read before the next one writes
        return numbers

    def _hold(self, chunk: Chunk) -> _Column:
        slot = chunk.resident.slot
        if slot not in self._held:
            taken, self._free = self._free[: chunk.count], self._free[chunk.count :]
            assert len(taken) == chunk.count, "chunks in flight never exceed the last prompt rung"
            self._held[slot] = np.array(taken, dtype=np.int64)
        return self._held[slot]

    def drop(self, slot: int) -> None:
        """The chunk of `slot` needs its state rows no longer."""
        self._free.extend(self._held.pop(slot, np.empty(0, dtype=np.int64)).tolist())

    def _send(self, to: Tensor, numbers: _Column) -> None:
        if self._device.type == "cuda":
            staged = torch.empty(len(numbers), dtype=torch.int64, pin_memory=True)
            staged.numpy()[:] = numbers
            to[: len(numbers)].copy_(staged, non_blocking=True)
        else:
            to[: len(numbers)] = torch.from_numpy(numbers)


def samples_at_end(chunk: Chunk, loops: int) -> bool:
    """The tick that runs the chunk's current loop samples its request's first token."""
    return chunk.depth + 1 == loops and chunk.ends_prompt and chunk.resident.samples
