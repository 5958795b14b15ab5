"""Checks of the GPU kernels on the card: errors against float32, and bits across everything that must not matter.

Owns what is compared with what. Each check returns plain numbers for the report; the caller judges none of them twice:
`ok` is the judgement.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from epicycle.engine.kernels.bench.rows import PAGE_TOKENS, decode_batch, make_pool, make_turning, prompt_batch
from epicycle.engine.kernels.bench.shapes import Shape, turning_configs
from epicycle.engine.kernels.bench.timing import random_weights
from epicycle.engine.kernels.candidates import candidates, sure
from epicycle.engine.kernels.decode_attention_triton import decode_attention, plain_decode_attention
from epicycle.engine.kernels.gemm_triton import added_parts, plain_product, run_product
from epicycle.engine.kernels.hopper_prompt_triton import ROWS, hopper_prompt_attention, takes
from epicycle.engine.kernels.norm_triton import gate_logit, norm, norm_after, plain_norm_after
from epicycle.engine.kernels.plain import PlainOps
from epicycle.engine.kernels.products import LIBRARY, GemmConfig, Product
from epicycle.engine.kernels.prompt_attention_triton import PromptConfig, plain_prompt_attention, prompt_attention
from epicycle.engine.kernels.rope_kv_triton import RowAddresses, plain_rope_kv, rope_kv
from epicycle.engine.kernels.triton_common import starts_early
from epicycle.engine.kernels.turned_check import Heads, is_equal

Report = dict[str, object]
ROW_COUNTS = (1, 2, 16, 17, 32, 64, 96, 128, 256, 384, 512, 1024, 2048)
TINY = 1e-6


def error(actual: Tensor, exact: Tensor) -> float:
    """Relative error in the 2-norm; infinite when anything isn't finite."""
    if not bool(actual.isfinite().all()):
        return float("inf")
    return float((actual.double() - exact.double()).norm() / exact.double().norm())


def within_twice(actual: Tensor, plain: Tensor, exact: Tensor) -> Report:
    """The house rule: at most twice the error of the same maths in plain torch at that dtype."""
    mine, theirs = error(actual, exact), error(plain, exact)
    return {"error": mine, "plain_error": theirs, "ok": mine <= 2 * theirs + TINY}


def check_product(kind: Product) -> Report:
    """The sure kernel against float32."""
    x, weight = _inputs(kind, 48)
    y = _whole(run_product(kind, x, weight, sure(kind)), x.dtype)
    exact = plain_product(x.float(), weight.float(), epilogue=kind.epilogue, chunks=1)
    plain = plain_product(x, weight, epilogue=kind.epilogue, chunks=1)
    return within_twice(y, plain, exact)


def _inputs(kind: Product, rows: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, kind.inputs, dtype=torch.bfloat16, device="cuda")
    return x, random_weights(kind.weight_rows, kind.inputs, 1)[0]


def _whole(y: Tensor, dtype: torch.dtype) -> Tensor:
    return added_parts(y, dtype) if y.ndim == 3 else y


def check_product_bits(kind: Product, configs: list[GemmConfig], row_counts: tuple[int, ...] = ROW_COUNTS) -> Report:
    """All rows of every configuration at every row count against the sure kernel at the largest one."""
    x, weight = _inputs(kind, max(row_counts))
    expected = _whole(run_product(kind, x, weight, sure(kind)), x.dtype)
    differs: dict[str, list[tuple[int, int]]] = {}
    for config in configs:
        bad = []
        for rows in row_counts:
            try:
                y = _whole(run_product(kind, x[:rows], weight, config), x.dtype)
            except Exception as problem:  # a configuration that this card refuses is a result, not an end
                differs[f"{config.key} failed"] = [(rows, 0)]
                print(f"  {kind.name} {config.key}: {type(problem).__name__} {problem}"[:200])
                break
            unequal = int((y != expected[:rows]).any(dim=1).sum())
            if unequal:
                bad.append((rows, unequal))
        if bad:
            differs[config.key] = bad
    return {"differs": differs, "configs": len(configs), "ok": not (differs.keys() - {LIBRARY.key})}


def all_candidates(kind: Product) -> list[GemmConfig]:
    """Every configuration of every rung, once, and the library."""
    found: dict[str, GemmConfig] = {}
    for rows in ROW_COUNTS:
        found.update({config.key: config for config in candidates(kind, rows)})
    return list(found.values())


def check_norms(shape: Shape) -> Report:
    """Every stage against its twin in float32 and in bfloat16, and rows alone against rows together."""
    rows, width = 37, shape.hidden
    h, a, first, second = (torch.randn(size, dtype=torch.bfloat16, device="cuda") for size in (
        (rows, width), (rows, width), (width,), (width,)))  # fmt: skip
    parts = torch.randn(4, rows, width, device="cuda")
    stage, eps = shape.norm_stage, 1e-6
    _, x = norm_after(stage, a, h, first, second, eps)
    _, plain = plain_norm_after(stage, a, h, first, second, eps)
    _, exact = plain_norm_after(stage, a.float(), h.float(), first.float(), second.float(), eps)
    report = within_twice(x, plain, exact)
    from_parts = norm_after(stage, parts, h, first, second, eps)[1]
    rounded = norm_after(stage, added_parts(parts, torch.bfloat16), h, first, second, eps)[1]
    alone = torch.cat(
        [norm_after(stage, parts[:, i : i + 1], h[i : i + 1], first, second, eps)[1] for i in range(rows)]
    )
    report["parts_equal"] = torch.equal(from_parts, rounded)
    report["alone_equal"] = torch.equal(from_parts, alone)
    report["equal_to_plain"] = float((norm(h, first, eps) == PlainOps().rms_norm(h, first, eps)).float().mean())
    gate, bias = random_weights(1, width, 1)[0], torch.zeros(1, dtype=torch.bfloat16, device="cuda")
    report["gate"] = within_twice(
        gate_logit(h, gate, bias), PlainOps().gate_logit(h, gate, bias), (h.double() @ gate.double().T).squeeze(1)
    )
    report["ok"] = bool(report["ok"] and report["parts_equal"] and report["alone_equal"])
    return report


def check_decode(shape: Shape, run: int) -> Report:
    """Against float32, fused against separate, and every row alone against the batch; pages beyond lengths poisoned."""
    lengths = [1, 2, 15, 16, 17, 63, 64, 65, 200, 256, 257, 700, 1025, 3000]
    pool = make_pool(shape, len(lengths) * 188, 2)  # as many pages as all windows have: none is shared
    turning = make_turning(shape, 4096)
    batch = decode_batch(shape, pool, lengths, run)
    _poison_beyond(pool.v, batch.rows, lengths, 1)
    qkv = torch.randn(len(lengths), (shape.heads + 2 * shape.kv_heads) * shape.head_dim, device="cuda").bfloat16()
    fused_k, fused_v = pool.k.clone(), pool.v.clone()
    early_k, early_v = pool.k.clone(), pool.v.clone()
    common = (shape.heads, batch.rows, batch.work, batch.scratch)
    fused = decode_attention(qkv, *common, fused_k, fused_v, 1, turning=turning)
    plain_k, plain_v = pool.k.clone(), pool.v.clone()
    plain_q = plain_rope_kv(qkv, shape.heads, turning, batch.rows, plain_k, plain_v, 1)
    q = rope_kv(qkv, shape.heads, turning, batch.rows, pool.k, pool.v, 1)
    out = decode_attention(q, *common, pool.k, pool.v, 1)
    together = [out]
    if starts_early(q.device):
        together.append(decode_attention(qkv, *common, early_k, early_v, 1, turning=turning, early=True))
        turned = rope_kv(qkv, shape.heads, turning, batch.rows, early_k, early_v, 1, early=True)
        together.append(decode_attention(turned, *common, early_k, early_v, 1, early=True))
    plain = plain_decode_attention(q, shape.heads, batch.rows, pool.k, pool.v, 1)
    exact = plain_decode_attention(q.float(), shape.heads, batch.rows, pool.k.float(), pool.v.float(), 1)
    report = within_twice(out, plain, exact)
    report["rope_equal_share"] = float((q == plain_q).float().mean())
    report["written_equal_share"] = float((pool.k == plain_k).float().mean())
    report["fused_equal"] = torch.equal(fused, out) and torch.equal(fused_k, pool.k)
    report["tickets_zero"] = int(batch.scratch.tickets.abs().sum()) == 0
    alone, early = [], []
    for row, length in enumerate(lengths):
        one = decode_batch(shape, pool, [length], run)
        rows = _one_row(batch.rows, row)
        own = (shape.heads, rows, one.work, one.scratch)
        alone.append(decode_attention(q[row : row + 1], *own, pool.k, pool.v, 1))
        if starts_early(q.device):
            at, again = qkv[row : row + 1], (early_k, early_v, 1)
            early.append(decode_attention(at, *own, *again, turning=turning, early=True, ahead=True))
            report["tickets_zero"] = bool(report["tickets_zero"]) and int(one.scratch.tickets.abs().sum()) == 0
    report["alone_equal"] = torch.equal(torch.cat(alone), out)
    pairs = [(one, out) for one in (*together, torch.cat(early) if early else out)]
    pairs += [(early_k, pool.k), (_bits(early_v), _bits(pool.v))] if early else []
    report["early_equal"] = all(torch.equal(*pair) for pair in pairs)
    names = ("ok", "fused_equal", "tickets_zero", "alone_equal", "early_equal")
    report["ok"] = all(bool(report[name]) for name in names)
    return report


def check_turned(shape: Shape) -> Report:
    """QKV products that turn their rows and write them, against the product and the launch behind it."""
    device = torch.device("cuda", torch.cuda.current_device())
    heads = Heads(shape.heads, shape.kv_heads, shape.head_dim)
    configs = turning_configs(shape)
    differs = [
        (config.key, rows)
        for config in configs
        for rows in (*ROW_COUNTS, 63, 130, 1000, 2064)
        if not is_equal(config, shape.qkv, heads, rows, torch.bfloat16, device)
    ]
    return {"ok": bool(configs) and not differs, "differs": differs, "configs": len(configs)}


def _bits(values: Tensor) -> Tensor:
    """Poison is not equal to itself."""
    return values.view(torch.int16)


def _one_row(rows: RowAddresses, row: int) -> RowAddresses:
    at = slice(row, row + 1)
    return replace(rows, slots=rows.slots[at], positions=rows.positions[at], plane_slots=rows.plane_slots[at])


def _poison_beyond(v_pool: Tensor, rows: RowAddresses, lengths: list[int], layer: int) -> None:
    """NaN in every cell of the layer that no row has written, in the pages that rows hold."""
    _, page_tokens, kv_heads, width = v_pool.shape
    cells = v_pool.view(-1, kv_heads, width)
    for row, length in enumerate(lengths):
        most = rows.page_table.shape[1] * page_tokens
        beyond = torch.arange(length, most, dtype=torch.int32, device=v_pool.device)
        of_row, plane = (column[row].expand(len(beyond)) for column in (rows.slots, rows.plane_slots))
        at = replace(rows, slots=of_row, positions=beyond, plane_slots=plane)
        cells[at.cells(layer, page_tokens)] = float("nan")


def check_prompt(shape: Shape) -> Report:
    """Against float32, cut differently, and with other query tiles and settings."""
    pool = make_pool(shape, 200, 3)
    chunks = [(0, 300), (130, 129), (700, 1), (5, 64)]
    rows, packed = prompt_batch(pool, chunks, 128)
    q = torch.randn(rows.slots.shape[0], shape.heads * shape.head_dim, dtype=torch.bfloat16, device="cuda")
    out = prompt_attention(q, shape.heads, rows, packed, pool.k, pool.v, 1)
    plain = plain_prompt_attention(q, shape.heads, rows, packed, pool.k, pool.v, 1)
    exact = plain_prompt_attention(q.float(), shape.heads, rows, packed, pool.k.float(), pool.v.float(), 1)
    report = within_twice(out, plain, exact)
    cut = [(0, 77), (77, 223), (130, 1), (131, 128), (700, 1), (5, 3), (8, 61)]
    slots = [
        slot for slot, count in ((0, 77), (0, 223), (1, 1), (1, 128), (2, 1), (3, 3), (3, 61)) for _ in range(count)
    ]
    other_rows, other = prompt_batch(pool, cut, 128)
    owners = torch.tensor(slots, dtype=torch.int32, device="cuda")
    other_rows = replace(other_rows, slots=owners, page_table=rows.page_table)
    again = prompt_attention(q, shape.heads, other_rows, other, pool.k, pool.v, 1)
    report["cut_equal"] = torch.equal(out, again)
    for tile, warps, stages in ((64, 4, 1), (64, 4, 2), (128, 8, 2)):
        _, other = prompt_batch(pool, chunks, tile)
        config = PromptConfig(warps, stages)
        again = prompt_attention(q, shape.heads, rows, other, pool.k, pool.v, 1, config=config)
        report[f"q{tile}w{warps}s{stages}_equal"] = torch.equal(out, again)
    equal = True
    for item in ROWS if takes(shape.head_dim, PAGE_TOKENS, q.dtype, q.device) else ():
        for at, cuts in ((rows, chunks), (other_rows, cut)):
            _, other = prompt_batch(pool, cuts, item)
            again = hopper_prompt_attention(q, shape.heads, at, other, pool.k, pool.v, 1)
            equal &= torch.equal(out, again)
    report["hopper_equal"] = equal
    report["ok"] = bool(report["ok"] and report["cut_equal"] and report["hopper_equal"])
    return report


def check_far_addresses() -> Report:
    """Writes and reads beyond 2**31 elements of a pool."""
    shape = Shape("far", 128, 1, 1, 128, 128, 128, 1, 1, False, "sandwich")
    pool = make_pool(shape, 1_060_000, 1)  # 2.17e9 elements each
    turning = make_turning(shape, 64)
    batch = decode_batch(shape, pool, [40], 256)
    batch.rows.page_table.copy_(torch.tensor([[1_059_000, 3, 1_059_999]], dtype=torch.int32))
    qkv = torch.randn(1, 3 * 128, dtype=torch.bfloat16, device="cuda")
    out = decode_attention(qkv, 1, batch.rows, batch.work, batch.scratch, pool.k, pool.v, 0, turning=turning)
    q = rope_kv(qkv, 1, turning, batch.rows, pool.k, pool.v, 0)
    plain = plain_decode_attention(q, 1, batch.rows, pool.k, pool.v, 0)
    found = error(out, plain)  # a wrong address is an error of order one
    return {"error": found, "ok": found < 0.02}
