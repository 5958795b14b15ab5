"""What the actors of the control process say to each other. They share a process, so these never meet a wire.

Admission tells the scheduler whom to admit and whom to take away; the scheduler tells admission what is free and who
has left, and the kv actor when the pool should be empty.
"""

from __future__ import annotations

from dataclasses import dataclass

from epicycle.actors.slot_table import LAST_RANK, NO_RANK, Rank
from epicycle.transport.wire.control import Capabilities
from epicycle.transport.wire.kv import Snapshot
from epicycle.transport.wire.plan import StepReport
from epicycle.transport.wire.request import Cancel, ResetCache, Submit


@dataclass(frozen=True, slots=True)
class ExecutorUp:
    """An executor is there: empty slots, an empty pool, and these facts. `epoch` tells it from all others."""

    name: str
    epoch: int
    facts: Capabilities
    role: str = "full"


@dataclass(frozen=True, slots=True)
class ExecutorDown:
    """It is gone with everything it held."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """Nobody listens to this gateway's requests any more; no verdicts, no tokens."""

    number: int


@dataclass(frozen=True, slots=True)
class Admit:
    """Give `submit` a slot and `pages` pages of an executor now; admission has seen that both are there.

    `keys` are those of its prompt's full pages; it may share what is cached of the first `most_hits`. `source_epoch`:
    the executor that computes the prompt; 0: the same one. `rank`: its place in the queue.
    """

    submit: Submit
    executor_epoch: int
    arrived_s: float
    queue_ms: float
    pages: int
    keys: tuple[bytes, ...] = ()
    most_hits: int = 0
    source_epoch: int = 0
    rank: Rank = NO_RANK


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Take an admitted request away. `reason` as in Fin: cancelled, deadline, shutdown."""

    rid: int
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class WithdrawAll:
    """Take every admitted request away."""

    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Room:
    """What admission may give away of an executor: slots, and pages net of what running rows are owed; to whom goes
    before `before`, the best of the requests that are saved and come back first."""

    executor_epoch: int
    slots: int
    pages: int
    before: Rank


@dataclass(frozen=True, slots=True)
class Pressed:
    """The best of those that wait finds no room: lower ones may have to make way. It would claim `pages` pages; those
    of the first `most_hits` of `keys` may be cached. Not for an executor whose context is below `most_tokens`. The last
    rank of all: nobody waits for room any more."""

    rank: Rank = LAST_RANK
    pages: int = 0
    most_tokens: int = 0
    keys: tuple[bytes, ...] = ()
    most_hits: int = 0


@dataclass(frozen=True, slots=True)
class Published:
    """The prompt of `rid` is computed: others may share its pages, and whoever waits may need fewer."""

    rid: int


@dataclass(frozen=True, slots=True)
class Left:
    """`rid` holds nothing any more."""

    rid: int


@dataclass(frozen=True, slots=True)
class Again:
    """`submit` holds nothing any more and no token of it was sent: it is to run again, as if it had never left the
    queue."""

    submit: Submit
    arrived_s: float


@dataclass(frozen=True, slots=True)
class PoolIdle:
    """No request holds a slot of this executor: every page should be free, or cached."""

    executor: str


@dataclass(frozen=True, slots=True)
class StartDrain:
    """Admit nobody from now on."""


ToAdmission = Submit | Cancel | ExecutorUp | ExecutorDown | GatewayLost | Room | Published | Left | Again | StartDrain
ToScheduler = (
    StepReport | Admit | Pressed | Withdraw | WithdrawAll | ResetCache | ExecutorUp | ExecutorDown | GatewayLost
)
ToKv = Snapshot | PoolIdle
