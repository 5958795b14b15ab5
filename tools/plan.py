"""`epicycle plan`: the memory plan of a model and a budget, without loading it.

Reads config files and does arithmetic: no torch, no device. The same formulas size the running server's pool; its own
start-up line has the room it measured where this command takes --memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import msgspec

from epicycle.engine.errors import EngineError
from epicycle.engine.models.config import read_spec
from epicycle.engine.models.locate import locate
from epicycle.engine.models.spec import ModelSpec
from epicycle.kvstore.errors import KvError
from epicycle.kvstore.geometry import KvGeometry
from epicycle.kvstore.layouts import KvLayout, build_layout
from epicycle.kvstore.plan import GIB, PoolPlan, PoolRequest, plan_pool
from epicycle.kvstore.reserve import pages_for

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def main(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    try:
        spec = read_spec(locate(arguments.model, "random").folder)
        layout = layout_of(spec, arguments)
        plan = plan_pool(request(spec, layout, arguments))
    except (EngineError, KvError) as error:
        print(f"epicycle plan: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(as_json(layout, plan)))
    else:
        show(arguments.model, spec, layout, plan)
        print("what if:")
        for words, changes in what_ifs(arguments, plan):
            print(f"  {words:28} {what_if(spec, argparse.Namespace(**vars(arguments) | changes))}")
    return 0


def what_ifs(arguments: argparse.Namespace, plan: PoolPlan) -> list[tuple[str, dict[str, Any]]]:
    """(words, changed arguments): one thing changed at a time."""
    half = plan.context_tokens // 2
    rows: list[tuple[str, dict[str, Any]]] = [
        (f"--slots {2 * arguments.slots}", {"slots": 2 * arguments.slots}),
        (f"--context {half}", {"context": half}),
        (f"--memory {2 * arguments.memory // GIB}GiB", {"memory": 2 * arguments.memory}),
    ]
    layouts: list[tuple[str, dict[str, Any]]] = [
        ("--kv-layout shared", {"kv_layout": "shared"}),
        ("--rectangular", {"rectangular": True}),
    ]
    return rows + [(words, changes) for words, changes in layouts if not changes.items() <= vars(arguments).items()]


def what_if(spec: ModelSpec, arguments: argparse.Namespace) -> str:
    """What a plan holds, or why there is none."""
    try:
        plan = plan_pool(request(spec, layout_of(spec, arguments), arguments))
    except KvError as error:
        return f"refused: {error}"
    return (
        f"{plan.total_pages * plan.page_tokens:>12,} tokens; {plan.slots} slots x {plan.context_tokens:,} of context, "
        f"{plan.windows} whole windows"
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="epicycle plan", description=__doc__)
    made.add_argument("--model", default="embedded:ouro", help="embedded model, shipped config, or folder")
    made.add_argument("--memory", type=parse_bytes, default=120 * GIB, help="bytes for KV, such as 120GiB (default)")
    made.add_argument("--slots", type=int, default=32, help="requests resident at once")
    made.add_argument("--context", type=int, default=0, help="context in tokens; 0: the largest that fits")
    made.add_argument("--page-tokens", type=int, default=16, help="positions per page")
    made.add_argument("--kv-layout", default="last_exited", help="last_exited, shared, or budgeted:K")
    made.add_argument("--rectangular", action="store_true", help="the twin without slot-exact pages")
    made.add_argument("--dtype", choices=sorted(DTYPE_BYTES), default="bfloat16", help="KV element type")
    made.add_argument("--chunk", type=int, default=256, help="prompt tokens of one request per tick")
    made.add_argument("--json", action="store_true", help="every term as one JSON line")
    return made


def parse_bytes(text: str) -> int:
    """`512MiB`, `120GiB`, `1.5G`, `1000000`. Raises ArgumentTypeError naming what is accepted."""
    number = text.upper().removesuffix("IB").removesuffix("B")
    unit = number[-1:] if number[-1:].isalpha() else ""
    try:
        return int(float(number.removesuffix(unit)) * UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} isn't a size; write 512MiB, 120GiB or a number of bytes") from None


def layout_of(spec: ModelSpec, arguments: argparse.Namespace) -> KvLayout:
    geometry = KvGeometry(
        layers=spec.layers,
        first_recurrent=spec.first_recurrent,
        recurrent_layers=spec.recurrent_layers,
        loops=spec.loops,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        element_bytes=DTYPE_BYTES[arguments.dtype],
        page_tokens=arguments.page_tokens,
    )
    return build_layout(arguments.kv_layout, geometry, packed=not arguments.rectangular)


def request(spec: ModelSpec, layout: KvLayout, arguments: argparse.Namespace) -> PoolRequest:
    """Per-slot state outside the pages is counted as the row's state and its page table."""
    context = min(arguments.context or spec.context_tokens, spec.context_tokens)
    table_bytes = 4 * pages_for(context, arguments.page_tokens)
    return PoolRequest(
        room_bytes=arguments.memory,
        page_bytes=layout.page_bytes,
        page_tokens=arguments.page_tokens,
        context_limit_tokens=context,
        context_is_auto=arguments.context == 0,
        slots=arguments.slots,
        fixed_bytes=spec.state_width * DTYPE_BYTES[arguments.dtype] + table_bytes + spec.vocab_size * 5,
        run_pages=pages_for(arguments.chunk, arguments.page_tokens),
    )


def as_json(layout: KvLayout, plan: PoolPlan) -> dict[str, object]:
    return {"layout": msgspec.to_builtins(layout.facts), **plan.terms()}


def show(model: str, spec: ModelSpec, layout: KvLayout, plan: PoolPlan) -> None:
    facts = layout.facts
    print(f"{model}: {spec.loops} loops, {spec.layers} KV layers of which {spec.recurrent_layers} recur")
    packing = "slot-exact" if facts.is_packed else "rectangular"
    print(
        f"{facts.name}, {packing}: {facts.planes} planes, {facts.slots_per_page} slots a page, "
        f"{facts.bytes_per_token:,} bytes a token"
    )
    print(plan.line())
    pool_tokens = plan.total_pages * plan.page_tokens
    print(f"the pool holds {pool_tokens:,} tokens")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
