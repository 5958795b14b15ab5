"""Compiling what the kernel benchmark times, side by side and ahead of it.

Owns the settings of attention that are timed, and the list of one small launch for every kernel that would compile.
Kernels go into the disk cache, so processes that come later find them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from functools import partial

import torch

from epicycle.engine.kernels.bench import checks
from epicycle.engine.kernels.bench.rows import PAGE_TOKENS, decode_batch, make_pool, make_turning, prompt_batch
from epicycle.engine.kernels.bench.shapes import SHAPES, Shape
from epicycle.engine.kernels.candidates import sure
from epicycle.engine.kernels.decode_attention_triton import DecodeConfig, decode_attention
from epicycle.engine.kernels.gemm_triton import run_product, stored_as
from epicycle.engine.kernels.products import LIBRARY, GemmConfig, Product, chunk_length
from epicycle.engine.kernels.prompt_attention_triton import PromptConfig, prompt_attention
from epicycle.engine.kernels.prompt_check import hopper_prompt_holds
from epicycle.engine.kernels.rope_kv_triton import rope_kv
from epicycle.engine.kernels.share_check import share_holds

DECODE_CONFIGS = (DecodeConfig(2, 4, 128), DecodeConfig(2, 3, 168), DecodeConfig(3, 3, 168), DecodeConfig(3, 2, None))
PROMPT_CONFIGS = (  # query tile, then how it runs
    (64, PromptConfig(4, 3)),
    (64, PromptConfig(4, 2)),
    (128, PromptConfig(8, 3)),
    (128, PromptConfig(8, 2)),
)
WARMERS = 15


def holds(shape: Shape) -> bool:
    """Whether prompt attention for Hopper serves such heads on this card."""
    device = torch.device("cuda", torch.cuda.current_device())
    return hopper_prompt_holds(shape.heads, shape.kv_heads, shape.head_dim, PAGE_TOKENS, torch.bfloat16, device)


def shares(shape: Shape) -> bool:
    """Whether prompt and decode attention of such heads may share this card out."""
    device = torch.device("cuda", torch.cuda.current_device())
    facts = shape.heads, shape.kv_heads, shape.head_dim, PAGE_TOKENS, torch.bfloat16, device
    return hopper_prompt_holds(*facts) and share_holds(*facts)


def warm_units() -> list[Callable[[], object]]:
    """One small launch for every distinct compiled product kernel."""
    units: dict[tuple[object, ...], Callable[[], object]] = {}
    for shape in SHAPES.values():
        for kind in shape.products():
            for config in [*checks.all_candidates(kind), sure(kind)]:
                if config == LIBRARY:
                    continue
                lengths = (chunk_length(kind.inputs, kind.chunks), kind.inputs)
                is_masked = config.kernel == "stream" and any(length % config.block_k for length in lengths)
                key = (config.key, stored_as(kind, config), kind.chunks, is_masked)
                units.setdefault(key, partial(_launch_small, kind, config))
    return list(units.values())


def _launch_small(kind: Product, config: GemmConfig) -> None:
    outputs = 512
    small = Product(kind.name, outputs, kind.inputs, kind.epilogue, kind.chunks)
    x = torch.zeros(8, kind.inputs, dtype=torch.bfloat16, device="cuda")
    run_product(small, x, x.new_zeros(small.weight_rows, kind.inputs), config)


def attention_units() -> list[Callable[[], object]]:
    """The attention kernels in every form that is timed or checked."""
    units: list[Callable[[], object]] = []
    for shape in SHAPES.values():
        units += [partial(_decode_small, shape, config) for config in DECODE_CONFIGS]
        units.append(partial(_decode_small, shape, DecodeConfig(), is_separate=True))
        units += [partial(_prompt_small, shape, *settings) for settings in PROMPT_CONFIGS]
        units.append(partial(holds, shape))
    return units


def _decode_small(shape: Shape, config: DecodeConfig, *, is_separate: bool = False) -> None:
    pool = make_pool(shape, 8, 1)
    batch, turning = decode_batch(shape, pool, [40, 40], 0), make_turning(shape, 64)
    qkv = torch.zeros(2, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, dtype=torch.bfloat16, device="cuda")
    q = rope_kv(qkv, shape.heads, turning, batch.rows, pool.k, pool.v, 0)
    decode_attention(
        q if is_separate else qkv, shape.heads, batch.rows, batch.work, batch.scratch, pool.k, pool.v, 0,
        turning=None if is_separate else turning, config=config,
    )  # fmt: skip


def _prompt_small(shape: Shape, query: int, config: PromptConfig) -> None:
    pool = make_pool(shape, 8, 1)
    rows, packed = prompt_batch(pool, [(0, 16)], query)
    q = torch.zeros(16, shape.heads * shape.head_dim, dtype=torch.bfloat16, device="cuda")
    prompt_attention(q, shape.heads, rows, packed, pool.k, pool.v, 0, config=config)


def warm(index: int, of: int) -> None:
    """Compile this worker's share of the kernels into the disk cache."""
    for unit in [*attention_units(), *warm_units()][index::of]:
        try:
            unit()
        except Exception as problem:
            print(f"  warm: {type(problem).__name__} {problem}"[:200])


def warm_in_parallel(command: Sequence[str]) -> str:
    """Compilation takes a second a kernel and a core each: spread it."""
    workers = [subprocess.Popen([*command, "--warm", f"{index}/{WARMERS}"]) for index in range(WARMERS)]
    codes = [worker.wait() for worker in workers]
    return f"{len(warm_units()) + len(attention_units())} kernels, exit codes {codes}"
