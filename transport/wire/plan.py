"""Control <-> executor: who runs and how much (Plan), what has happened (StepReport).

The scheduler decides who and how much; the executor decides which loop next. A Plan is a difference and may be merged
with the one still pending; a StepReport carries totals, so that merged or repeated reports lose nothing.
"""

from __future__ import annotations

from epicycle.transport.wire.base import Wire
from epicycle.transport.wire.request import LoopBounds, Sampling
from epicycle.transport.wire.transfer import Export, Import, TransferFailure

# Upper bounds of StepReport.rows_per_tick.
ROWS_PER_TICK_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Join(Wire, frozen=True):
    """Give `slot` (generation `gen`) to `rid`, with its lease.

    `pages` (I32) is the page table so far, in position order; positions below `limit_tokens` may be written.
    `prefix_tokens` of the prompt are already in the pages (prefix cache). They may be the whole prompt: its last token
    is computed again, in every plane of its own, which writes the bits that are there. `queue_ms`: waited before this.
    `imports` and `exports`: the two sides of a prompt that another executor computes (`transfer.py` tells how).
    `head_to` >= 0: keep what the first token is sampled from in that head row; `head_from` >= 0, with the whole prompt
    in the pages: sample the first token from that row and compute nothing of the prompt. `host_pages` (I32): the last
    of the prefix's pages are copied from these before the row runs.
    """

    rid: int
    gateway: int
    slot: int
    gen: int
    prompt: bytes
    pages: bytes
    limit_tokens: int
    sampling: Sampling
    loops: LoopBounds
    prefix_tokens: int = 0
    noise_seed: int = 0
    queue_ms: float = 0.0
    imports: Import | None = None
    exports: Export | None = None
    head_to: int = -1
    head_from: int = -1
    host_pages: bytes = b""


class Grow(Wire, frozen=True):
    """Append `pages` to the table of (slot, gen); positions below `limit_tokens` may be written from now on.

    `is_final`: the pool has no more to give this row: at the limit it ends with reason `length` and a warning.
    """

    slot: int
    gen: int
    pages: bytes
    limit_tokens: int
    is_final: bool = False


class Evict(Wire, frozen=True):
    """Take (slot, gen) off the device. `reason`: cancelled, deadline, shutdown, or preempt. Already gone: ignored.

    The executor emits Fin with that reason and reports the slot freed. Where the Evict `is_silent` (the request will
    run again) there is no Fin, and a row that has taken its prompt over meanwhile stays: tokens of it may be on their
    way, and the report that it has moved tells control. A preempted row is saved instead: its pages are copied to the
    host pages `host_pages` (I32, one for each page of its table), its state stays with the executor under its rid, and
    the report lists the slot as saved once slot and pages may be used again. It may end before that.
    """

    slot: int
    gen: int
    reason: str = "cancelled"
    message: str = ""
    is_silent: bool = False
    host_pages: bytes = b""


class Resume(Wire, frozen=True):
    """Give `slot` (generation `gen`) to the saved request `rid`, which goes on where it was.

    `pages` (I32) is its page table; the first `attached_pages` hold what they should, those behind them are copied back
    from `host_pages` (I32, as many as hold anything). Positions below `limit_tokens` may be written.
    """

    rid: int
    slot: int
    gen: int
    pages: bytes
    limit_tokens: int
    attached_pages: int = 0
    host_pages: bytes = b""


class Drop(Wire, frozen=True):
    """End the saved request `rid`: the executor forgets it and emits Fin with `reason`. Not saved here: ignored."""

    rid: int
    reason: str = "cancelled"
    message: str = ""


class Knobs(Wire, frozen=True):
    """Settings the scheduler may turn while the executor runs; 0 keeps the value."""

    prompt_chunk_tokens: int = 0


class Plan(Wire, frozen=True, tag=10):
    """One coalesced difference. `epoch` is the executor's, `seq` grows by one for each Plan sent.

    Order of application: spills, drops, resumes, evicts, grows, joins; so host pages that a Resume leaves may serve an
    Evict. `spilled_pages` (I32) are copied to the host pages `spilled_to` before anybody writes them again.
    `control_epoch` is the sender's: what a dead control left in the link may arrive after its successor's Reset, and is
    dropped.
    """

    epoch: int
    seq: int
    joins: list[Join] = []
    grows: list[Grow] = []
    evicts: list[Evict] = []
    knobs: Knobs = Knobs()
    control_epoch: int = 0
    resumes: list[Resume] = []
    drops: list[Drop] = []
    spilled_pages: bytes = b""
    spilled_to: bytes = b""


class Reset(Wire, frozen=True, tag=11):
    """Control lost its state: drop every slot without Fin, keep weights and graphs, answer with an empty report."""

    epoch: int
    control_epoch: int


class StepReport(Wire, frozen=True, tag=12):
    """What the executor has completed. Columns `slots`, `gens`, `tokens` (I32) list the rows that moved since the last
    report: `tokens` counts positions that hold KV or are in flight. `freed_*` list slots whose last tick is done: their
    pages may be used again. `saved_*` list rows that have been saved, with the positions that hold anything: their
    slots and pages may be used again as well. The counters are totals since the epoch began. `failed` names transfers
    that this side can't complete, each once; their rows stay until control evicts them.
    """

    epoch: int
    control_epoch: int
    plan_seq: int  # last Plan applied
    slots: bytes = b""
    gens: bytes = b""
    tokens: bytes = b""
    freed_slots: bytes = b""
    freed_gens: bytes = b""
    ticks: int = 0
    decode_row_loops: int = 0
    prompt_row_loops: int = 0
    loops_saved: int = 0
    rows_in_ticks: int = 0  # sum over ticks; / ticks = mean rows per tick
    mixed_depth_ticks: int = 0
    starved_latency: int = 0
    starved_pool: int = 0
    stale_messages: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    rows_per_tick: bytes = b""  # U64: ticks by their rows, one count for each bound and one for more
    failed: list[TransferFailure] = []
    saved_slots: bytes = b""  # I32, and so are the next two
    saved_gens: bytes = b""
    saved_tokens: bytes = b""
    spilled_pages: int = 0  # that have arrived on the host, since the epoch began


ToExecutor = Plan | Reset
FromExecutor = StepReport
