"""What the next tick is made of: which decode rows, how many prompt rows, and how many loops.

Owns how rows of fixed depth are kept in step, and how prompts are dosed beside rows that decode. Decides from the
host's numbers alone. It must not know leases, results or messages.
"""

from __future__ import annotations

from epicycle.engine.route import PromptQueue, Resident, TickWork
from epicycle.engine.tick import ANY_NUMBER, Tick

DECODE_ROWS_OF_A_CHUNK = 64  # so many more let a chunk be as large again: their tick takes longer by itself
SMALL_DOSES = 16  # prompts that so many small chunks hold are read in such; it takes as many tokens of a running stream
TOKENS_OF_A_QUEUE = 8  # longer ones are to be read in the time of so many tokens


class TickPlanner:
    """`loops` is the model's depth, `chunk_tokens` the prompt rows of a tick in which few rows decode.

    `ordered_rows` is what the scheduler has asked for instead, 0 where it leaves the dose to us.
    """

    def __init__(self, tick: Tick, prompts: PromptQueue, loops: int, chunk_tokens: int) -> None:
        self._tick = tick
        self._prompts = prompts
        self._loops = loops
        self._chunk_tokens = chunk_tokens
        self.ordered_rows = 0
        self._dose_rows = 0

    def next_work(self, decode: list[Resident]) -> TickWork:
        """The next tick, of decode rows that may run and whatever prompts may; it may be empty."""
        may_start, loops = True, 1
        if self._tick.takes_whole_tokens and _has_one_depth(decode):
            decode, may_start = self._keep_step(decode)
            loops = self._loops if may_start and decode and decode[0].max_loops == self._loops else 1
        chunks = self._prompts.take(self._budget_rows(len(decode)), may_start=may_start)
        return TickWork(decode, chunks, 1 if chunks else loops)

    def _budget_rows(self, decode_rows: int) -> int:
        """Prompt rows of one tick: as many as it takes while more requests wait for their prompts than decode. Then
        few enough to hardly hold up so many decode rows, unless a lot is left of them.
        A dose once found necessary is kept until nobody waits, or what is left last would trickle.
        """
        most_rows = self._tick.most_prompt_rows
        if self.ordered_rows or most_rows == ANY_NUMBER:
            return min(self.ordered_rows or self._chunk_tokens, most_rows)
        waiting, left = self._prompts.waiting, self._prompts.rows_left
        if not waiting:
            self._dose_rows = 0
            return 0
        shares = 1 + decode_rows // DECODE_ROWS_OF_A_CHUNK
        small = self._chunk_tokens << (shares.bit_length() - 1)  # doubled, as the ladder's rungs are
        wanted = small if left <= SMALL_DOSES * small else -(-left // TOKENS_OF_A_QUEUE)
        wanted = most_rows if decode_rows < waiting else wanted
        self._dose_rows = min(most_rows, max(self._dose_rows, wanted))
        if self._dose_rows == most_rows >= left:
            return left  # nothing is gained by leaving a few for a tick of their own
        return self._tick.prompt_room(decode_rows, self._dose_rows)

    def _keep_step(self, decode: list[Resident]) -> tuple[list[Resident], bool]:
        """Rows of one fixed depth start their tokens together: those ahead wait, and prompts start when tokens do.

        Returns the rows that run now, and whether a token and a prompt may start.
        """
        if len({row.planned_loops for row in decode}) > 1:
            decode = [row for row in decode if row.planned_loops]
        is_boundary = all(row.planned_loops == 0 for row in decode)
        return decode, is_boundary and not self._prompts.is_under_way


def _has_one_depth(decode: list[Resident]) -> bool:
    return all(row.is_fixed_depth and row.max_loops == decode[0].max_loops for row in decode)
