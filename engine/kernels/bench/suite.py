"""Check, tune and time every GPU kernel on one card, and whole loops of both models.

Owns the sections of the benchmark and what each prints; `tools/bench_kernels.py` is its command line. Needs torch,
Triton and a GPU, nothing else.
"""

from __future__ import annotations

import json
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from epicycle.engine.attention_choice import installed_libraries
from epicycle.engine.kernels.bench import checks
from epicycle.engine.kernels.bench.beside import Tick, time_beside
from epicycle.engine.kernels.bench.flash import time_flash
from epicycle.engine.kernels.bench.loops import (
    Attend,
    Core,
    Loop,
    fused_decode,
    no_attention,
    prompt,
    separate_decode,
    turn_inside,
)
from epicycle.engine.kernels.bench.rows import decode_batch, make_pool, make_turning, prompt_batch
from epicycle.engine.kernels.bench.shapes import (
    HUGINN,
    OURO,
    SHAPES,
    Shape,
    layer_floor_us,
    product_floor_us,
    turning_configs,
)
from epicycle.engine.kernels.bench.timing import ceilings, random_weights
from epicycle.engine.kernels.bench.warm import DECODE_CONFIGS, PROMPT_CONFIGS, holds, shares, warm_in_parallel
from epicycle.engine.kernels.candidates import candidates, sure
from epicycle.engine.kernels.decode_attention_triton import decode_attention, default_config
from epicycle.engine.kernels.gemm_triton import run_product
from epicycle.engine.kernels.graph_times import copies_of, graph_us
from epicycle.engine.kernels.hopper_prompt_triton import ROWS as ITEM_ROWS
from epicycle.engine.kernels.hopper_prompt_triton import hopper_prompt_attention, item_rows
from epicycle.engine.kernels.products import LIBRARY, GemmConfig, Product
from epicycle.engine.kernels.prompt_attention_triton import QUERY_TILE, prompt_attention
from epicycle.engine.kernels.triton_common import multiplies_in_groups

OURO_TOKENS, HUGINN_TOKENS = 1088, 544  # a row's in the middle of the workloads' outputs; a power of two would flatter
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 2048)
BESIDE = (  # a length of decode rows, then how many of them beside which chunks
    (OURO, 1090, ((20, ((0, 1024), (0, 992))), (60, ((0, 1024), (0, 960))), (107, ((0, 1024), (0, 896))))),
    (OURO, 2080, ((20, ((32, 2016),)),)),
    (OURO, 16448, ((7, ((8192, 2040),)),)),
    (HUGINN, 544, ((40, ((0, 512), (0, 512), (0, 512), (0, 464))),)),
)
FLASH = ([(0, 2048)], [(0, 1024), (0, 1024)], [(14336, 2048)], [(0, 512)] * 4)  # chunks of prompts


class Bench:
    """Runs sections in order until time is up; everything found is in `report`."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.report: dict[str, object] = {}
        self.out = out
        self.end = time.monotonic() + seconds
        self.best: dict[tuple[str, int], tuple[float, GemmConfig]] = {}

    def section(self, name: str, run: Callable[[], object], needs_s: float) -> None:
        """Run one section if `needs_s` seconds are left; a failure is reported and doesn't end the run."""
        if time.monotonic() + needs_s > self.end:
            self.report[name] = "left out: no time"
            print(f"## {name}: left out, no time")
            return
        begun = time.monotonic()
        try:
            self.report[name] = run()
        except Exception:
            self.report[name] = traceback.format_exc()
            print(self.report[name])
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        print(f"## {name}: {time.monotonic() - begun:.1f} s", flush=True)
        self.out.write_text(json.dumps(self.report, indent=1, default=str))

    def pick(self, kind: Product, rows: int) -> GemmConfig:
        """The fastest measured configuration of the smallest timed row count that holds `rows`."""
        for step in ROWS:
            if step >= rows and (kind.name, step) in self.best:
                return self.best[kind.name, step][1]
        return sure(kind)

    def time_products(self, shape: Shape, rows: tuple[int, ...]) -> dict[str, dict[int, dict[str, float]]]:
        """Every candidate of every product, and the library beside it."""
        found: dict[str, dict[int, dict[str, float]]] = {}
        for kind in shape.products():
            weights = random_weights(kind.weight_rows, kind.inputs, copies_of(2 * kind.weight_rows * kind.inputs))
            found[kind.name] = {m: self._time_rows(kind, weights, m) for m in rows}
        return found

    def _time_rows(self, kind: Product, weights: list[torch.Tensor], rows: int) -> dict[str, float]:
        x = torch.randn(rows, kind.inputs, dtype=torch.bfloat16, device="cuda")
        times: dict[str, float] = {}
        for config in candidates(kind, rows):
            try:
                times[config.key] = graph_us([partial(run_product, kind, x, w, config) for w in weights])
            except Exception as problem:
                times[config.key] = float("inf")
                print(f"  {kind.name} {rows} {config.key}: {type(problem).__name__} {problem}"[:160])
                continue
            own = self.best.get((kind.name, rows), (float("inf"), sure(kind)))
            if times[config.key] < own[0] and (config != LIBRARY or self._is_equal(kind, x, weights[0])):
                self.best[kind.name, rows] = (times[config.key], config)
        linear = torch.nn.functional.linear
        times["plain linear"] = graph_us([partial(linear, x, w) for w in weights])
        self._print_product(kind, rows, times["plain linear"])
        return times

    def _is_equal(self, kind: Product, x: torch.Tensor, weight: torch.Tensor) -> bool:
        return torch.equal(run_product(kind, x, weight, LIBRARY), run_product(kind, x, weight, sure(kind)))

    def _print_product(self, kind: Product, rows: int, library_us: float) -> None:
        best_us, best = self.best[kind.name, rows]
        floor, weights = product_floor_us(kind, rows), kind.weight_rows * kind.inputs
        print(
            f"{kind.name:15s} M={rows:4d} {best_us:8.1f} us {best.key:28s} lib {library_us:8.1f} floor {floor:6.1f} "
            f"({floor / best_us:4.0%}) {2 * weights / best_us / 1e6:5.2f} TB/s "
            f"{2 * rows * weights / best_us / 1e6:5.0f} TFLOP/s",
            flush=True,
        )

    def time_decode(self, shape: Shape, lengths: list[int], runs: tuple[int, ...] = (0, 1024)) -> dict[str, float]:
        """One layer's decode attention, over lengths of runs (0: what suits) and settings."""
        pool = make_pool(shape, sum(-(-length // 16) for length in lengths), shape.layers)
        turning = make_turning(shape, max(lengths) + 16)
        rows, width = len(lengths), shape.heads * shape.head_dim
        qkv = torch.randn(rows, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, device="cuda").bfloat16()
        out = torch.empty(rows, width, dtype=torch.bfloat16, device="cuda")
        bytes_read = 2 * 2 * sum(lengths) * shape.kv_heads * shape.head_dim
        times: dict[str, float] = {}
        for run in runs:
            batch = decode_batch(shape, pool, lengths, run)
            common = (qkv, shape.heads, batch.rows, batch.work, batch.scratch, pool.k, pool.v)
            for config in DECODE_CONFIGS:
                key = f"run{run} s{config.stages}x{config.programs_per_sm}r{config.registers}"
                one = partial(decode_attention, *common, turning=turning, out=out, config=config)
                times[key] = graph_us([partial(one, layer=layer) for layer in range(shape.layers)])
        best = min(times, key=lambda key: times[key])
        name = f"{shape.name} decode {len(lengths)} x {max(lengths)}"
        print(f"{name:28s} best {times[best]:8.1f} us ({best})  {bytes_read / times[best] / 1e6:5.2f} TB/s")
        print("   " + "  ".join(f"{key}: {value:.1f}" for key, value in times.items()), flush=True)
        return times

    def time_prompt(self, shape: Shape, chunks: list[tuple[int, int]]) -> dict[str, float]:
        """One layer's prompt attention."""
        pages = sum(-(-(first + count) // 16) for first, count in chunks)
        pool = make_pool(shape, pages, 4)
        rows = sum(count for _, count in chunks)
        q = torch.randn(rows, shape.heads * shape.head_dim, dtype=torch.bfloat16, device="cuda")
        pairs = sum(count * first + count * (count + 1) / 2 for first, count in chunks)
        work_flop = 4 * pairs * shape.heads * shape.head_dim
        times: dict[str, float] = {}
        for query, config in PROMPT_CONFIGS:
            at, packed = prompt_batch(pool, chunks, query)
            one = partial(prompt_attention, q, shape.heads, at, packed, pool.k, pool.v, config=config)
            key = f"q{query} w{config.warps}s{config.stages}"
            times[key] = graph_us([partial(one, layer=layer) for layer in range(4)])
        for query in ITEM_ROWS if holds(shape) else ():
            at, packed = prompt_batch(pool, chunks, query)
            one = partial(hopper_prompt_attention, q, shape.heads, at, packed, pool.k, pool.v)
            times[f"hopper q{query}"] = graph_us([partial(one, layer=layer) for layer in range(4)])
        best = min(times, key=lambda key: times[key])
        rate = work_flop / times[best] / 1e6
        print(f"{shape.name} prompt {chunks[0]} x{len(chunks)} best {times[best]:.1f} us ({best}) {rate:.0f} TFLOP/s")
        print("   " + "  ".join(f"{key}: {value:.1f}" for key, value in times.items()), flush=True)
        return times

    def time_loops(self, shape: Shape, decode: Sequence[tuple[int, int]], prompts: Sequence[int]) -> dict[str, float]:
        """Whole loops as graphs: decode rows at a context length, and one prompt from position 0."""
        core, found = Core(shape), {}
        turning = make_turning(shape, 4096)
        pages = max([rows * -(-context // 16) for rows, context in decode] + [-(-count // 16) for count in prompts])
        pool = make_pool(shape, pages, shape.layers)
        for rows, context in decode:
            floor = shape.layers * layer_floor_us(shape, rows, context)
            batch = decode_batch(shape, pool, [context] * rows, 0)
            forms: dict[str, Attend] = {
                "fused": fused_decode(shape, pool, batch, turning, default_config(rows, shape.head_dim)),
                "separate": separate_decode(shape, pool, batch, turning, default_config(rows, shape.head_dim)),
            }
            for form, attend in forms.items():
                name = f"{shape.name} loop {rows} x {context} {form}"
                found[name] = self._time_loop(name, Loop(core, rows, self.pick, attend), floor)
            name = f"{shape.name} loop {rows} without attention"
            found[name] = self._time_loop(name, Loop(core, rows, self.pick, no_attention(shape, rows)), floor)
        for count in prompts:
            is_hopper = holds(shape)
            tile = item_rows(count, shape.heads, pool.k.device) if is_hopper else QUERY_TILE
            at, chunks = prompt_batch(pool, [(0, count)], tile)
            name = f"{shape.name} loop of a {count}-token prompt"
            floor = shape.layers * layer_floor_us(shape, count, 0)
            found[name] = self._time_loop(
                name,
                Loop(core, count, self.pick, prompt(shape, pool, at, chunks, turning, is_hopper=is_hopper)),
                floor,
            )
            for config in turning_configs(shape) if is_hopper else ():
                form, turn = f"{name} {config.key}", turn_inside(shape, pool, at, turning, config)
                attend = prompt(shape, pool, at, chunks, None, is_hopper=True)
                found[form] = self._time_loop(form, Loop(core, count, self.pick, attend, turn), floor)
        return found

    def _time_loop(self, name: str, loop: Loop, floor_us: float) -> float:
        took = graph_us([loop])
        print(f"{name:66s} {took / 1000:8.3f} ms  floor {floor_us / 1000:7.3f} ({floor_us / took:4.0%})", flush=True)
        return took

    def time_beside(self, shape: Shape, core: Core, tick: Tick) -> dict[str, object]:
        """One tick of decode rows beside prompt rows."""
        turn = next(iter(turning_configs(shape)), None)
        found = time_beside(shape, core, self.pick, turn, tick)
        print(f"{shape.name} beside {found}", flush=True)
        return found

    def check(self, name: str, run: Callable[[], checks.Report]) -> checks.Report:
        """Run a check and say how it went."""
        try:
            report = run()
        except Exception:
            report = {"ok": False, "failed": traceback.format_exc()}
            print(report["failed"])
        short = {key: value for key, value in report.items() if key not in ("ok", "failed")}
        print(f"{'ok  ' if report['ok'] else 'BAD '} {name}: {short}"[:700], flush=True)
        return report

    def check_all(self) -> dict[str, checks.Report]:
        found = {}
        for shape in SHAPES.values():
            for kind in shape.products():
                found[kind.name] = self.check(kind.name, partial(checks.check_product, kind))
            found[f"{shape.name}.norms"] = self.check(f"{shape.name}.norms", partial(checks.check_norms, shape))
            for run in (0, 128, 1024):
                name = f"{shape.name}.decode.{run}"
                found[name] = self.check(name, partial(checks.check_decode, shape, run))
            found[f"{shape.name}.prompt"] = self.check(f"{shape.name}.prompt", partial(checks.check_prompt, shape))
            if turning_configs(shape) and multiplies_in_groups(torch.device("cuda", torch.cuda.current_device())):
                found[f"{shape.name}.turned"] = self.check(f"{shape.name}.turned", partial(checks.check_turned, shape))
        found["far addresses"] = self.check("far addresses", checks.check_far_addresses)
        return found

    def check_bits(self, shape: Shape) -> dict[str, checks.Report]:
        return {
            kind.name: self.check(
                f"bits of {kind.name}", partial(checks.check_product_bits, kind, checks.all_candidates(kind))
            )
            for kind in shape.products()
        }


def time_ceilings() -> dict[str, float]:
    found = ceilings()
    print(found)
    return found


def run_checks(bench: Bench) -> None:
    bench.section("ceilings", time_ceilings, 0)
    bench.section("checks", bench.check_all, 8)
    for shape in SHAPES.values():
        bench.section(f"bits {shape.name}", partial(bench.check_bits, shape), 4)


def run_ouro(bench: Bench) -> None:
    bench.section("products", partial(bench.time_products, OURO, ROWS), 8)
    bench.section("decode 1", partial(bench.time_decode, OURO, [OURO_TOKENS]), 2)
    bench.section(
        "loops", partial(bench.time_loops, OURO, [(rows, OURO_TOKENS) for rows in (1, 8, 32, 128)], (512, 2048)), 10
    )
    bench.section("decode 32", partial(bench.time_decode, OURO, [OURO_TOKENS] * 32), 2)
    bench.section("decode 128", partial(bench.time_decode, OURO, [OURO_TOKENS] * 128), 2)
    bench.section("decode long", partial(bench.time_decode, OURO, [16448] * 8), 2)
    bench.section("prompt 2048", partial(bench.time_prompt, OURO, [(0, 2048)]), 2)
    bench.section("prompt 512 at 16K", partial(bench.time_prompt, OURO, [(15872, 512)]), 2)
    bench.section("prompt packed", partial(bench.time_prompt, OURO, [(512, 128)] * 4), 2)


def run_huginn(bench: Bench) -> None:
    bench.section("products", partial(bench.time_products, HUGINN, ROWS), 8)
    bench.section("loops", partial(bench.time_loops, HUGINN, [(rows, HUGINN_TOKENS) for rows in (1, 8, 64)], (512,)), 6)
    bench.section("decode 64", partial(bench.time_decode, HUGINN, [HUGINN_TOKENS] * 64), 2)


def run_beside(bench: Bench) -> None:
    """Loops take the products that are fastest in this part's own times."""
    for shape, length, ticks in BESIDE:
        if not shares(shape):
            bench.report[f"beside {shape.name}"] = "left out: this card doesn't share"
            continue
        bench.section(f"products {shape.name}", partial(bench.time_products, shape, (2048,)), 4)
        core = Core(shape)
        for rows, chunks in ticks:
            name = f"{shape.name} {rows} x {length} beside {chunks}"
            bench.section(name, partial(bench.time_beside, shape, core, Tick((length,) * rows, chunks)), 4)


def run_flash(bench: Bench) -> None:
    """Prompt attention of the FlashAttention libraries that are installed, beside the kernels here."""
    if not installed_libraries():
        bench.section("flash", lambda: "left out: no FlashAttention library is installed", 0)
        return
    for shape in SHAPES.values():
        for spans in FLASH:
            bench.section(f"flash {shape.name} {spans}", partial(time_flash, shape, spans), 4)


PARTS: dict[str, Callable[[Bench], None]] = {
    "ouro": run_ouro,
    "checks": run_checks,
    "huginn": run_huginn,
    "beside": run_beside,
    "flash": run_flash,
}
"""Each in a process of its own, so that one that breaks the device's context doesn't take the others with it."""


def run_parts(command: Sequence[str], out: Path, seconds: float) -> None:
    """Compile in parallel, then run the parts one after the other and join their reports. `command` starts this
    benchmark's command line again."""
    end = time.monotonic() + seconds
    report: dict[str, object] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    report["warm up"] = warm_in_parallel(command)
    print(f"## warm up: {report['warm up']}, {seconds - (end - time.monotonic()):.0f} s", flush=True)
    for name in PARTS:
        left, file = end - time.monotonic(), out.with_suffix(f".{name}.json")
        words = [*command, "--part", name, "--out", str(file), "--seconds", str(left)]
        try:
            code: object = subprocess.run(words, timeout=max(left, 1.0) + 20).returncode
        except subprocess.TimeoutExpired:
            code = "stopped: out of time"
        report[name] = json.loads(file.read_text()) if file.exists() else None
        report[f"{name} exit"] = code
        out.write_text(json.dumps(report, indent=1, default=str))
    print(json.dumps({"device": report["device"], "exits": {name: report[f"{name} exit"] for name in PARTS}}))


def run_here(parts: Sequence[str], out: Path, seconds: float) -> None:
    """Run `parts` in this process."""
    torch.manual_seed(20261129)
    bench = Bench(out, seconds)
    for part in parts:
        print(f"# {part}", flush=True)
        PARTS[part](bench)
