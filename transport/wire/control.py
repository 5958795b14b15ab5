"""Supervisor <-> everyone: start-up, liveness, drain, and the health view.

A child says Hello, loads, says Ready with what it resolved and the paths it has bound; it beats from then on. The
supervisor answers with PeerUp/PeerDown for the peers it needs, and Drain or Stop.
"""

from __future__ import annotations

from epicycle.transport.wire.base import Wire
from epicycle.transport.wire.transfer import TransferFacts


class Capabilities(Wire, frozen=True):
    """What the executor resolved while loading: the facts of the model and the pool as they will be served.

    Everything a gateway or the scheduler needs to validate and to account; none of it changes within an epoch.
    """

    model_id: str
    model_type: str
    vocab_size: int
    context_tokens: int  # min(model, pool)
    model_context_tokens: int
    loops: int
    eos_ids: bytes  # I32
    exit_rule: str
    can_exit_early: bool
    slots: int
    total_pages: int
    page_tokens: int
    page_bytes: int
    bytes_per_token: int
    kv_layout: str
    planes: int
    dtype: str
    device: str
    prompt_chunk_tokens: int
    run_ahead_ticks: int
    fingerprint: str = ""
    versions: list[str] = []  # "torch 2.13.0", ...
    plan_line: str = ""
    max_logprobs: int = 20
    max_stop_ids: int = 64
    max_logit_bias: int = 512
    transfer: TransferFacts | None = None  # an executor that can exchange KV with others
    attention: str = ""  # the kernels' choice and its reason, one line
    graphs: int = 0  # captured at start
    graph_bytes: int = 0
    graph_ms: int = 0  # that capturing took
    host_pages: int = 0  # pages' worth of host memory for preempted rows
    plan_terms: dict[str, int] = {}  # of the pool plan, by name; `plan_line` says the same in words
    kept_heads: int = 0  # head rows behind those of the slots, for prompts that may be repeated
    host_prefix_pages: int = 0  # host pages behind `host_pages`, for cached prefixes that the pool gives up
    most_spills: int = 0  # pages on their way there at once


class Hello(Wire, frozen=True, tag=40):
    """First words of a child. A wrong wire_version is refused with Stop."""

    name: str  # "control", "gw0", "ex0"
    pid: int
    nonce: str
    epoch: int
    wire_version: int


class Endpoint(Wire, frozen=True):
    """A path this incarnation has bound. `link` is one of submit, cancel, verdicts, plan, reports, tokens, client,
    transfer."""

    link: str
    address: str


class Ready(Wire, frozen=True, tag=41):
    """The child can work. Only the executor fills `capabilities`."""

    name: str
    epoch: int
    endpoints: list[Endpoint] = []
    capabilities: Capabilities | None = None


class MailboxStat(Wire, frozen=True):
    link: str
    depth: int
    rejected: int = 0


class Beat(Wire, frozen=True, tag=42):
    """Alive, from a thread or timer of its own. `progress` counts work done; `pending` is work accepted but not
    finished. Stale is decided by the supervisor: no beat for 3 s, or pending > 0 and no progress for watchdog_s.
    """

    name: str
    epoch: int
    state: str  # loading, ready, draining, failed
    progress: int = 0
    pending: int = 0
    mailboxes: list[MailboxStat] = []
    last_error: str = ""
    counters: dict[str, float] = {}  # what /metrics shows for this actor


class PeerUp(Wire, frozen=True, tag=43):
    """`name` is Ready at `epoch`; connect to these endpoints (older ones are dead: close with LINGER 0)."""

    name: str
    epoch: int
    endpoints: list[Endpoint]
    capabilities: Capabilities | None = None


class PeerDown(Wire, frozen=True, tag=44):
    """`name` at `epoch` is gone: fail what it owed. `reason` is for people."""

    name: str
    epoch: int
    reason: str


class Drain(Wire, frozen=True, tag=45):
    """Stop admitting; finish what runs within `deadline_ms`, abort the rest, answer Drained."""

    deadline_ms: int


class Drained(Wire, frozen=True, tag=46):
    name: str
    epoch: int


class Stop(Wire, frozen=True, tag=47):
    """Leave now. `reason` is for the log."""

    reason: str = ""


class Fatal(Wire, frozen=True, tag=48):
    """The child is about to exit with a non-zero code, and why (cause + value + knob)."""

    name: str
    epoch: int
    code: str
    message: str


class HealthQuery(Wire, frozen=True, tag=49):
    """Asked by the CLI, a gateway or a client. `is_deep` also sends a Ping through every actor's mailbox."""

    ref: int = 0
    is_deep: bool = False


class ActorHealth(Wire, frozen=True):
    name: str
    pid: int
    state: str  # starting, loading, ready, draining, stale, failed, restarting; of the supervisor also stopped
    epoch: int
    restarts: int
    beat_age_ms: float
    progress_age_ms: float  # 0 when nothing is pending
    mailbox_depth: int
    mailbox_rejected: int
    in_flight: int
    last_error: str = ""
    last_error_age_ms: float = -1.0
    rss_bytes: int = 0
    hop_ms: float = -1.0  # deep only: round trip through the actor's mailbox
    is_required: bool = True
    counters: dict[str, float] = {}
    mailboxes: list[MailboxStat] = []


class HealthReply(Wire, frozen=True, tag=50):
    """`status`: healthy, degraded, dead. `problems` names what is wrong, one line each; empty iff healthy."""

    ref: int
    status: str
    instance_state: str  # starting, running, draining, stopped
    problems: list[str]
    actors: list[ActorHealth]
    restarts_total: int = 0


class Ping(Wire, frozen=True, tag=51):
    """Goes through the actor's own mailbox, not the liveness thread."""

    ref: int


class Pong(Wire, frozen=True, tag=52):
    ref: int
    name: str


ToSupervisor = Hello | Ready | Beat | Drained | Fatal | HealthQuery | Pong
FromSupervisor = PeerUp | PeerDown | Drain | Stop | HealthReply | Ping
