"""The health of the instance, told from the supervisor's table: what /health, /readyz, /metrics and the CLI show.

healthy: every required actor is Ready at its current epoch, its heartbeat fresh, its pending work moving. A full queue
is healthy; starting, draining, restarting and hung are degraded; dead means that an actor will not come back.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from epicycle.actors.peers import Peer, Peers
from epicycle.transport.config import SupervisorConfig
from epicycle.transport.wire.control import ActorHealth, HealthReply

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Pinged:
    """A round of pings: its number, and when it went out."""

    ref: int
    sent_s: float


def view(
    peers: Peers, config: SupervisorConfig, instance_state: str, now_s: float, ref: int, pinged: Pinged | None = None
) -> HealthReply:
    """The reply to the query `ref`. After a round of pings the hops are filled, and a missing Pong is a problem."""
    problems = [] if instance_state == "running" else [f"the instance is {instance_state}"]
    actors: list[ActorHealth] = []
    for peer in peers:
        hang = peer.hang(config, now_s)
        hop_ms = (peer.pong_s - pinged.sent_s) * 1000 if pinged and peer.pong_ref == pinged.ref else -1.0
        problem = _problem(peer, hang)
        if pinged and hop_ms < 0 and not problem:
            waited_ms = (now_s - pinged.sent_s) * 1000
            problem = f"{peer.name} did not answer a ping through its mailbox in {waited_ms:.0f} ms"
        problems += [problem] if problem else []
        actors.append(_actor(peer, "stale" if hang else peer.state, hop_ms, now_s))
    actors.append(_supervisor(instance_state, hop_ms=0.0 if pinged else -1.0))
    return HealthReply(
        ref=ref,
        status=_status(peers, problems, instance_state),
        instance_state=instance_state,
        problems=problems,
        actors=actors,
        restarts_total=sum(peer.restarts for peer in peers),
    )


def _status(peers: Peers, problems: list[str], instance_state: str) -> str:
    if instance_state == "stopped":
        return "dead"
    if instance_state != "running" and any(peer.state == "failed" for peer in peers):
        return "dead"  # while it runs, a failed child is about to be restarted
    return "degraded" if problems else "healthy"


def _problem(peer: Peer, hang: str) -> str:
    if hang:
        return f"{peer.name} (epoch {peer.epoch}) is stale: {hang}"
    if peer.state == "ready":
        return ""
    cause = f": {peer.last_error}" if peer.last_error and peer.state != "draining" else ""
    return f"{peer.name} (epoch {peer.epoch}) is {peer.state}{cause}"


def _actor(peer: Peer, state: str, hop_ms: float, now_s: float) -> ActorHealth:
    beat = peer.beat
    mailboxes = beat.mailboxes if beat else []
    pending = beat.pending if beat else 0
    return ActorHealth(
        name=peer.name,
        pid=peer.pid,
        state=state,
        epoch=peer.epoch,
        restarts=peer.restarts,
        beat_age_ms=_age_ms(peer.beat_s, now_s),
        progress_age_ms=_age_ms(peer.moved_s, now_s) if pending else 0.0,
        mailbox_depth=sum(stat.depth for stat in mailboxes),
        mailbox_rejected=sum(stat.rejected for stat in mailboxes),
        in_flight=pending,
        last_error=peer.last_error,
        last_error_age_ms=_age_ms(peer.last_error_s, now_s),
        rss_bytes=rss_bytes(peer.pid),
        hop_ms=hop_ms,
        counters=beat.counters if beat else {},
        mailboxes=mailboxes,
    )


def _supervisor(instance_state: str, hop_ms: float) -> ActorHealth:
    """The one who answers: its answer is its heartbeat."""
    state = "ready" if instance_state == "running" else instance_state
    pid = os.getpid()
    return ActorHealth("supervisor", pid, state, 1, 0, 0.0, 0.0, 0, 0, 0, rss_bytes=rss_bytes(pid), hop_ms=hop_ms)


def _age_ms(since_s: float, now_s: float) -> float:
    return (now_s - since_s) * 1000 if since_s >= 0 else -1.0


def rss_bytes(pid: int) -> int:
    """Resident bytes of a process; 0 for none."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0
