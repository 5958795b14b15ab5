"""How many more requests a pool would hold if full pages let go of the planes that none of their tokens ran.

Takes exit depths as they were drawn for a workload, or as the embedded model really leaves, cuts them into pages and
counts planes: a full page of generated tokens needs as many planes as its deepest token ran, pages of prompt and the
last page need all. Arithmetic over `kvstore` layouts; `compact` is what storage token by token would need. The last
line is JSON. Usage: `python -m epicycle.tools.page_collapse`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from epicycle.engine.engine import Engine
from epicycle.kvstore.geometry import KvGeometry
from epicycle.kvstore.layouts import build_layout
from epicycle.kvstore.reserve import pages_for
from epicycle.tools.bench_workload import TRACES
from epicycle.tools.offline import Offline, Request
from epicycle.transport.config import EngineConfig
from epicycle.transport.wire.request import LoopBounds, Sampling

LOOPS, LAYERS = 4, 24
PAGES = (4, 8, 16)
SHAPES = ((1024, 128), (128, 128), (128, 1024))  # prompt, output
REQUESTS = 256
REAL_REQUESTS, REAL_OUTPUTS, REAL_THRESHOLD = 24, 64, 0.4


@dataclass(frozen=True)
class Figure:
    """`more` and `compact`: how many more requests fit, as a share, with collapsed pages and token by token."""

    depths: str
    mean_depth: float
    page_tokens: int
    prompt: int
    output: int
    more: float
    compact: float


def drawn_depths(requests: int, output: int, seed: int = 0) -> list[list[int]]:
    """As the workloads draw them: independently; the first output runs full depth."""
    rng, odds = random.Random(seed), TRACES["trace-2.45"]
    draw = [rng.choices(list(odds), list(odds.values()), k=output - 1) for _ in range(requests)]
    return [[LOOPS, *depths] for depths in draw]


def real_depths() -> list[list[int]]:
    """The embedded model's own, at a threshold where they average as the drawn ones do; neighbours are alike or not."""
    engine = Engine.load(EngineConfig(slots=8, context_tokens=96))
    rng = random.Random(0)
    requests = [
        Request(
            prompt=[rng.randrange(3, engine.spec.vocab_size) for _ in range(16)],
            sampling=Sampling(REAL_OUTPUTS, temperature=0.8, seed=number),
            loops=LoopBounds(exit_threshold=REAL_THRESHOLD),
        )
        for number in range(REAL_REQUESTS)
    ]
    return [reply.exit_depths for reply in Offline(engine).run(requests)]


def slots_of(depths: Sequence[int], prompt: int, page_tokens: int) -> tuple[int, int, float]:
    """(slots with whole pages, with collapsed ones, token by token) of one request in the end, of all its planes.

    Output `i` stands at position prompt + i; the last one is never fed back.
    """
    layout = build_layout("last_exited", _geometry(page_tokens))
    written = [LOOPS] * prompt + list(depths[1:])
    pages = [written[at : at + page_tokens] for at in range(0, len(written), page_tokens)]
    planes = [max(page) if len(page) == page_tokens else LOOPS for page in pages]
    assert len(pages) == pages_for(len(written), page_tokens)
    whole = len(pages) * layout.slots_per_page
    return (
        whole,
        sum(layout.start(plane) if plane < LOOPS else layout.slots_per_page for plane in planes),
        sum(LAYERS * depth for depth in written) / page_tokens,
    )


def _geometry(page_tokens: int) -> KvGeometry:
    return KvGeometry(
        layers=LAYERS,
        first_recurrent=0,
        recurrent_layers=LAYERS,
        loops=LOOPS,
        kv_heads=16,
        head_dim=128,
        element_bytes=2,
        page_tokens=page_tokens,
    )


def figure(name: str, depths: Sequence[Sequence[int]], prompt: int, page_tokens: int) -> Figure:
    sums = [sum(column) for column in zip(*(slots_of(each, prompt, page_tokens) for each in depths), strict=True)]
    later = [depth for each in depths for depth in each[1:]]
    return Figure(
        depths=name,
        mean_depth=round(sum(later) / len(later), 3),
        page_tokens=page_tokens,
        prompt=prompt,
        output=len(depths[0]),
        more=round(sums[0] / sums[1] - 1, 4),
        compact=round(sums[0] / sums[2] - 1, 4),
    )


def main() -> int:
    found = [
        figure("drawn", drawn_depths(REQUESTS, output), prompt, page_tokens)
        for prompt, output in SHAPES
        for page_tokens in PAGES
    ]
    real = [depths for depths in real_depths() if len(depths) == REAL_OUTPUTS]
    found += [figure("embedded model", real, prompt, page_tokens) for prompt in (16, 128) for page_tokens in PAGES]
    for each in found:
        print(
            f"{each.depths:15} mean {each.mean_depth:.2f}, pages of {each.page_tokens:2}, "
            f"{each.prompt:4} in {each.output:4} out: {each.more:+.1%} requests; token by token {each.compact:+.1%}"
        )
    print(json.dumps({"page_collapse": [asdict(each) for each in found]}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
