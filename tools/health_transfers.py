"""What `epicycle health` tells of KV that executors hand each other: one line for each that sends or receives.

Reads the counters of heartbeats. It must not know where they come from.
"""

from __future__ import annotations

from collections.abc import Iterator

from epicycle.transport.wire.control import ActorHealth


def transfer_lines(actors: list[ActorHealth]) -> Iterator[str]:
    for actor in actors:
        told = {key.partition("{")[0]: value for key, value in actor.counters.items() if key.startswith("transfer")}
        if told.get("transfer_sent_total") or told.get("transfer_received_total"):
            yield f"{actor.name} transfers: " + ", ".join(_parts(told))


def _parts(told: dict[str, float]) -> Iterator[str]:
    def of(name: str) -> float:
        return told.get(f"transfer_{name}", 0.0)

    if of("received_total"):
        yield f"{of('received_total'):.0f} received"
    sent_bytes = of("sent_bytes_total")
    if of("sent_total"):
        yield f"{of('sent_total'):.0f} sent, {sent_bytes / 2**20:.1f} MiB"
        yield f"{of('blocks_total'):.0f} blocks in {of('segments_total'):.0f} segments, {of('writes_total'):.0f} writes"
        yield f"{100 * of('early_bytes_total') / max(1.0, sent_bytes):.0f} % while prompts were computed"
        yield f"commit tail (median) {of('tail_median_seconds') * 1e3:.1f} ms"
    yield f"{of('inflight_bytes') / 2**20:.1f} MiB in flight"
    if of("link_bytes_per_second"):
        yield f"link {of('link_bytes_per_second') / 1e9:.1f} GB/s at start"
