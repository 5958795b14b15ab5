"""Every GPU kernel compiles for Hopper without a GPU, spills nothing, and uses the instructions it is written for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton isn't installed: pip install 'triton>=3.6'")

import triton.language as tl
from triton.experimental.gluon import language as gl

from epicycle.engine.kernels import (
    argmax_triton,
    commit_triton,
    early_rows_triton,
    early_triton,
    exit_triton,
    gemm_triton,
    noise_triton,
    norm_triton,
    rope_kv_triton,
    runs_triton,
    sample_triton,
    share_triton,
    silu_triton,
    tick_triton,
    wide_triton,
    work_triton,
)
from epicycle.engine.kernels.candidates import MOST_EARLY_BYTES, MOST_WIDE_BYTES, TURNED, can_turn, candidates
from epicycle.engine.kernels.ladder import STEPS
from epicycle.engine.kernels.products import GemmConfig, Product, chunk_length
from tests.fakes.compiled import ROWS, Compiled, F, H, I, L, N, compiled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def stream(config: GemmConfig, epilogue: str, chunks: int, path: Path) -> Compiled:
    sizes = dict.fromkeys(("N16", "K16", "x_stride16", "w_stride16", "y_stride16", "part_stride16", "chunk16"), N)
    pointers = {"x_ptr": H, "w_ptr": H, "bias_ptr": H, "rows_ptr": I, "count_ptr": I, "M": N}
    pointers["tile_height"] = N
    pointers["y_ptr"] = F if epilogue in ("float", "parts") else H
    blocks = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
    flags = {
        "MASK_K": True,
        "MASK_N": True,
        "HAS_BIAS": False,
        "HAS_ROWS": False,
        "HAS_COUNT": False,
    }
    constants = {**blocks, **flags, "CHUNKS": chunks, "EPILOGUE": gemm_triton.EPILOGUES[epilogue], "DTYPE": tl.bfloat16}
    launch = {"num_warps": config.warps, "num_stages": config.stages}
    return compiled(gemm_triton.stream_kernel, {**pointers, **sizes}, constants, path, **launch)


def early(product: Product, config: GemmConfig, epilogue: str, path: Path) -> Compiled:
    sizes = dict.fromkeys(("N16", "K16", "x_stride16", "w_stride16", "y_stride16", "part_stride16", "chunk16"), N)
    pointers = {"x_ptr": H, "w_ptr": H, "y_ptr": F if epilogue in ("float", "parts") else H, "tile_height": N}
    constants = {"BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "STAGES": config.stages, "WARPS": config.warps}
    steps = -(-chunk_length(product.inputs, product.chunks) // config.block_k)
    constants |= {"STEPS": 1 << (steps - 1).bit_length(), "MASK_N": True, "MASK_K": product.inputs % 128 > 0}
    constants |= {"EPILOGUE": gemm_triton.EPILOGUES[epilogue]}
    launch = {"num_warps": config.warps, "launch_pdl": True}
    return compiled(
        early_triton.early_kernel, {**pointers, **sizes}, {**constants, "DTYPE": tl.bfloat16}, path, **launch
    )


def early_rows(config: GemmConfig, epilogue: str, path: Path) -> Compiled:
    layout = early_rows_triton.shared_layout()
    shapes = {"x_desc": config.block_m, "w_desc": config.block_n}
    arguments = {name: f"tensordesc<bf16[{rows}, {config.block_k}],{layout!r}>" for name, rows in shapes.items()}
    arguments |= {"y_ptr": F if epilogue == "parts" else H, "M": N}
    arguments |= dict.fromkeys(("N16", "K16", "y_stride16", "part_stride16", "chunk16"), N)
    constants = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
    constants |= {"STAGES": config.stages, "X_STAGES": config.x_stages, "WARPS": config.warps}
    constants |= {"EPILOGUE": gemm_triton.EPILOGUES[epilogue]}
    launch = {"num_warps": config.warps, "launch_pdl": True}
    return compiled(early_rows_triton.early_rows_kernel, arguments, {**constants, "DTYPE": tl.bfloat16}, path, **launch)


def tile(config: GemmConfig, epilogue: str, chunks: int, path: Path) -> Compiled:
    m, n, k = config.block_m, config.block_n, config.block_k
    shapes = {"x_desc": (m, k), "w_desc": (n, k), "y_desc": (m, n)}
    described = {name: f"tensordesc<bf16[{rows}, {width}]>" for name, (rows, width) in shapes.items()}
    arguments = {**described, "count_ptr": I, "M": N, "N16": N, "K16": N, "chunk_steps": N}
    constants = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": config.group_m, "CHUNKS": chunks}
    constants |= {"HAS_COUNT": True, "FLATTEN": config.flatten, "EPILOGUE": gemm_triton.EPILOGUES[epilogue]}
    launch = {"num_warps": config.warps, "num_stages": config.stages}
    return compiled(gemm_triton.tile_kernel, arguments, {**constants, "DTYPE": tl.bfloat16}, path, **launch)


def wide(config: GemmConfig, epilogue: str, chunks: int, path: Path, head: int = 128) -> Compiled:
    m, n, k = config.block_m, config.block_n // (2 if epilogue == "pair" else 1), config.block_k
    shapes = {"x_desc": (m, k), "w_desc": (n // 2, k), "y": (m // 2, n // 2)}
    layouts = {name: gl.NVMMASharedLayout.get_default_for(list(shape), gl.bfloat16) for name, shape in shapes.items()}
    arguments = {name: f"tensordesc<bf16[{rows}, {width}],{layouts[name]!r}>" for name, (rows, width) in shapes.items()}
    if epilogue in ("parts", "turned"):
        arguments["y"] = F if epilogue == "parts" else H
    if epilogue == "turned":
        layout = gl.NVMMASharedLayout.get_default_for([m // 2, head], gl.bfloat16)
        arguments |= {"angles_desc": f"tensordesc<bf16[{m // 2}, {head}],{layout!r}>", "cells": L}
        arguments |= {"k_pool": H, "v_pool": H, "kv_width16": N, "shift": N}
    arguments |= dict.fromkeys(("M", "N16", "steps", "whole", "cut", "y_stride16", "part_stride16"), N)
    constants = {"BLOCK_M": m, "BLOCK_N": config.block_n, "BLOCK_K": k, "GROUP_M": config.group_m}
    constants |= {"SLOTS": config.stages, "CHUNKS": chunks, "EPILOGUE": wide_triton.EPILOGUES[epilogue]}
    if epilogue != "turned":
        constants |= dict.fromkeys(("angles_desc", "k_pool", "v_pool", "cells", "kv_width", "shift"))
    return compiled(wide_triton.wide_kernel, arguments, {**constants, "DTYPE": tl.bfloat16}, path, num_warps=4)


def widest(product: Product) -> GemmConfig:
    """The candidate with the biggest tile."""
    every = [config for step in STEPS for config in candidates(product, step) if config.kernel == "tile"]
    return max(every, key=lambda config: config.block_m * config.block_n)


@pytest.mark.parametrize("epilogue", ["plain", "float", "pair", "parts"])
def test_products_of_few_rows_stream_weights_asynchronously(epilogue: str, tmp_path: Path) -> None:
    found = stream(GemmConfig("stream", 16, 32, 128, 4, 4), epilogue, 4 if epilogue == "parts" else 1, tmp_path)
    assert (0, 0) == (found.stack_bytes, found.spills)
    assert "LDGSTS" in found.sass
    assert "HMMA.16816.F32.BF16" in found.sass


ONE_ROW = [Product("qkv", 6144, 2048), Product("gate_up", 5632, 2048, "pair"), Product("down", 2048, 5632, chunks=4)]
ONE_ROW += [Product("wide", 15840, 5280), Product("deep", 5280, 17920)]


@pytest.mark.parametrize("product", ONE_ROW, ids=[product.name for product in ONE_ROW])
def test_products_of_one_row_ask_for_weights_before_they_wait(product: Product, tmp_path: Path) -> None:
    configs = [config for config in candidates(product, 1) if config.kernel == "early"]
    assert configs
    for config in configs:
        found = early(product, config, "parts" if product.chunks > 1 else product.epilogue, tmp_path)
        assert (0, 0) == (found.stack_bytes, found.spills)
        assert MOST_EARLY_BYTES + 4096 >= found.shared_bytes
        asks, waits = found.sass.index("LDGSTS.E.BYPASS.128"), found.sass.index("ACQBULK")
        assert asks < waits < found.sass.index("HMMA.16816.F32.BF16")
        assert 4 * (config.stages - 1) <= found.sass[:waits].count("LDGSTS.E.BYPASS.128")


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize("product", ONE_ROW[:3], ids=[product.name for product in ONE_ROW[:3]])
def test_products_of_a_few_rows_ask_for_weights_before_they_wait(product: Product, rows: int, tmp_path: Path) -> None:
    configs = [config for config in candidates(product, rows) if config.kernel == "rows"]
    assert bool(configs) == (rows < 128 or product.epilogue == "pair" or product.chunks > 1)
    for config in configs:
        found = early_rows(config, "parts" if product.chunks > 1 else product.epilogue, tmp_path)
        assert (0, 0) == (found.stack_bytes, found.spills)
        assert MOST_EARLY_BYTES + 1024 >= found.shared_bytes
        assert config.stages + config.x_stages == len(found.barriers)
        tiles, waits = 2 if product.epilogue == "pair" else 1, found.sass.index("ACQBULK")
        assert config.stages * tiles <= found.sass[:waits].count("UTMALDG")
        assert waits < found.sass.index(f"HGMMA.64x{rows}x16.F32.BF16")


@pytest.mark.parametrize(("epilogue", "chunks"), [("plain", 1), ("plain", 4), ("pair", 1)])
def test_products_of_many_rows_use_warp_group_products_and_the_tensor_copy_engine(
    epilogue: str, chunks: int, tmp_path: Path
) -> None:
    found = tile(widest(Product("any", 4096, 4096, epilogue, chunks)), epilogue, chunks, tmp_path)
    assert (0, 0) == (found.stack_bytes, found.spills)
    for instruction in ("HGMMA", "UTMALDG", "UTMASTG"):
        assert instruction in found.sass


@pytest.mark.parametrize(("epilogue", "chunks"), [("plain", 1), ("plain", 4), ("pair", 1), ("parts", 4)])
def test_wide_tiles_keep_everything_in_registers_and_wait_for_no_product_alone(
    epilogue: str, chunks: int, tmp_path: Path
) -> None:
    kernel = "wide-parts" if epilogue == "parts" else "wide"
    product = Product("any", 2048, 5632, "plain" if epilogue == "parts" else epilogue, chunks)
    configs = {config for step in STEPS for config in candidates(product, step) if config.kernel == kernel}
    assert configs
    for config in configs:
        found = wide(config, epilogue, chunks, tmp_path)
        assert (0, 0) == (found.stack_bytes, found.spills)
        assert 2 * config.stages == len(found.barriers)
        assert MOST_WIDE_BYTES + 1024 >= found.shared_bytes
        assert {"UTMALDG", "USETMAXREG"} <= set(re.findall(r"UTMALDG|USETMAXREG", found.sass))
        products = re.findall(rf"HGMMA\.64x{config.block_n}x16\S* [^;]*", found.sass)
        assert len(products) == config.block_k // 16 * sum("gsb0" in line for line in products) > 0  # once a step


@pytest.mark.parametrize("head", [64, 128])
def test_products_that_turn_their_rows_keep_everything_in_registers_and_store_lines(head: int, tmp_path: Path) -> None:
    configs = [config for config in TURNED if can_turn(config, Product("qkv", 48 * head, 2048), 16, 16, head)]
    assert configs
    for config in configs:
        found = wide(config, "turned", 1, tmp_path, head)
        assert (0, 0) == (found.stack_bytes, found.spills)
        assert 2 * config.stages + 1 == len(found.barriers)  # and one for angles
        assert MOST_WIDE_BYTES + 1024 >= found.shared_bytes
        tiles = [config.block_n] if config.block_n == head else [config.block_n, config.block_n // 2]
        products = {width: re.findall(rf"HGMMA\.64x{width}x16\S* [^;]*", found.sass) for width in tiles}
        for lines in products.values():
            assert len(lines) == config.block_k // 16 * sum("gsb0" in line for line in lines) > 0  # one wait a step
        stores = re.findall(r"STG\.E\.(\d+)", found.sass)
        assert {"128"} == set(stores) and 2 * sum(tiles) // 16 == len(stores)  # of 64 rows, by each of two groups


@pytest.mark.parametrize(
    ("units", "shares"), [(704, (660, 88)), (128, (128, 0)), (136, (132, 8)), (66, (0, 132)), (264, (264, 0))]
)
def test_a_round_that_half_of_the_card_would_sit_out_is_cut_in_two(units: int, shares: tuple[int, int]) -> None:
    assert shares == wide_triton.shared_out(units, 132)


def _norm() -> tuple[Any, dict[str, str], dict[str, Any]]:
    names = ("h_ptr", "after_ptr", "before_ptr", "h_out_ptr", "x_out_ptr")
    pointers = {"a_ptr": F} | dict.fromkeys(names, H)
    strides = ("a_stride16", "part_stride16", "h_stride16", "h_out_stride16", "x_out_stride16")
    constants = {"WIDTH": 2048, "BLOCK": 2048, "STAGE": 1, "PARTS": 4, "HAS_NEXT": True, "DTYPE": tl.bfloat16}
    constants["EARLY"] = True
    return norm_triton.norm_kernel, {**pointers, **dict.fromkeys(strides, N), "eps": "fp32"}, constants


def _gate() -> tuple[Any, dict[str, str], dict[str, Any]]:
    arguments = {"x_ptr": H, "weight_ptr": H, "bias_ptr": H, "out_ptr": F, "x_stride16": N}
    return norm_triton.gate_kernel, arguments, {"WIDTH": 2048, "BLOCK": 2048, "DTYPE": tl.bfloat16}


def _rope_kv() -> tuple[Any, dict[str, str], dict[str, Any]]:
    pointers = dict.fromkeys(("qkv_ptr", "q_out_ptr", "k_pool_ptr", "v_pool_ptr", "bias_ptr"), H)
    pointers |= {"cos_ptr": F, "sin_ptr": F, "plane_slots_ptr": I}
    sizes = dict.fromkeys(("qkv_stride16", "q_out_stride16", "turn_stride16", "layer"), N)
    constants = {"HEADS": 55, "KV_HEADS": 55, "HEAD_DIM": 96, "BLOCK_D": 128, "BLOCK_H": 8, "PAGE_TOKENS": 16}
    flags = {"PAIRS": True, "HAS_BIAS": True, "EARLY": True, "DTYPE": tl.bfloat16}
    return rope_kv_triton.rope_kv_kernel, {**pointers, **sizes, **ROWS}, {**constants, **flags}


def _rope() -> tuple[Any, dict[str, str], dict[str, Any]]:
    arguments = dict.fromkeys(("x_ptr", "cos_ptr", "sin_ptr", "out_ptr"), H)
    arguments |= {"x_stride16": N, "turn_stride16": N, "heads": N}
    constants = {"HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_H": 8, "PAIRS": False, "DTYPE": tl.bfloat16}
    return rope_kv_triton.rope_kernel, arguments, constants


def _exit() -> tuple[Any, dict[str, str], dict[str, Any]]:
    arguments = {"gate_ptr": F, "slots_ptr": I, "survival_ptr": F, "threshold_ptr": F, "rows": N, "trace_stride": N}
    whole = ("pending_ptr", "loops_done_ptr", "min_ptr", "max_ptr", "trace_ptr", "outputs_ptr")
    arguments |= dict.fromkeys(whole, L) | dict.fromkeys(("leaver_ptr", "count_ptr", "done_ptr"), I)
    return exit_triton.exit_kernel, arguments, {"RULE": exit_triton.RULES["ouro"], "BLOCK": 128}


def _fill() -> tuple[Any, dict[str, str], dict[str, Any]]:
    arguments = {"k_pool_ptr": H, "v_pool_ptr": H, "max_loops_ptr": L, "starts_ptr": L, "first_layer": N, "planes": N}
    arguments |= dict.fromkeys(("leaver_ptr", "count_ptr", "done_ptr"), I) | ROWS
    return commit_triton.fill_kernel, arguments, {"CELL": 2048, "BLOCK_C": 2048, "PAGE_TOKENS": 16}


def _noise() -> tuple[Any, dict[str, str], dict[str, Any]]:
    arguments = {"table_ptr": F, "seeds_ptr": L, "positions_ptr": L, "out_ptr": H, "out_stride": N, "width": N}
    return noise_triton.noise_kernel, arguments, {"BLOCK_W": 1024, "DTYPE": tl.bfloat16}


def _argmax() -> tuple[Any, dict[str, str], dict[str, Any]]:
    arguments = {"logits_ptr": F, "token_ptr": L, "finite_ptr": "*i8", "count_ptr": I, "stride16": N, "vocab16": N}
    return argmax_triton.argmax_kernel, arguments, {"HAS_COUNT": True}


def _silu() -> tuple[Any, dict[str, str], dict[str, Any]]:
    arguments = dict.fromkeys(("gate_ptr", "up_ptr", "out_ptr"), H)
    arguments |= dict.fromkeys(("gate_stride16", "up_stride16", "width16"), N)
    return silu_triton.silu_mul_kernel, arguments, {"BLOCK_W": 1024, "DTYPE": tl.bfloat16}


def _runs() -> tuple[Any, dict[str, str], dict[str, Any]]:
    arguments = dict.fromkeys(("sizes_ptr", "items_ptr", "total_ptr", "programs_ptr", "share_ptr"), I)
    arguments |= dict.fromkeys(("rows", "capacity", "piece", "programs", "heads", "length"), N)
    constants = {"MOST_RUN": runs_triton.MOST_RUN, "MOST_GROUPS": runs_triton.MOST_GROUPS}
    return runs_triton.runs_kernel, arguments, {**constants, "ROWS": 128, "START": 2, "SHARED": True}


def _share() -> tuple[Any, dict[str, str], dict[str, Any]]:
    arguments = dict.fromkeys(("share_ptr", "sizes_ptr", "starts_ptr", "counts_ptr"), I)
    arguments |= dict.fromkeys(("rows", "chunks", "item_rows", "heads", "kv_heads", "all_of_them"), N)
    return share_triton.share_kernel, arguments, {"ROWS": 128, "CHUNKS": 32, "ROW_START": 64, "ITEM_START": 512}


def _tiles() -> tuple[Any, dict[str, str], dict[str, Any]]:
    arguments = dict.fromkeys(("sizes_ptr", "starts_ptr", "items_ptr", "total_ptr", "taken_ptr"), I)
    return work_triton.tiles_kernel, arguments | {"owners": N, "capacity": N, "piece": N}, {"OWNERS": 32}


def _sample() -> tuple[Any, dict[str, str], dict[str, Any]]:
    arguments = dict.fromkeys(("logits_ptr", "reals_ptr", "bias_values_ptr", "logprob_ptr", "shares_ptr"), F)
    whole = ("found_ptr", "outputs_ptr", "integers_ptr", "bias_ids_ptr", "stop_ids_ptr", "token_ptr", "ids_ptr")
    arguments |= dict.fromkeys((*whole, "sums_ptr"), L) | dict.fromkeys(("count_ptr", "counts_ptr", "room_ptr"), I)
    arguments |= {"seen_ptr": "*i8", "finite_ptr": "*i8", "edited_ptr": F}
    arguments |= dict.fromkeys(("stride16", "rows", "vocab16", "biases", "stops"), N)
    return sample_triton.sample_kernel, arguments, {"BLOCK_B": 512, "BLOCK_S": 64}


def test_a_row_s_sampler_keeps_everything_in_registers(tmp_path: Path) -> None:
    kernel, arguments, constants = _sample()
    found = compiled(kernel, arguments, constants, tmp_path, num_warps=sample_triton.WARPS, enable_fp_fusion=False)
    assert (0, 0) == (found.stack_bytes, found.spills)


def _starters() -> tuple[Any, dict[str, str], dict[str, Any]]:
    whole = ("slots_ptr", "positions_ptr", "depths_ptr", "seeds_ptr", "tokens_ptr", "out_ptr")
    arguments = dict.fromkeys(whole, L) | {"live_ptr": "*i8", "count_ptr": I, "rows": N, "sink": N}
    return tick_triton.starters_kernel, arguments, {"BLOCK": 256}


def _put() -> tuple[Any, dict[str, str], dict[str, Any]]:
    arguments = {"x_ptr": H, "rows_ptr": L, "count_ptr": I, "to_ptr": H}
    return tick_triton.put_kernel, arguments, {"WIDTH": 10560, "BLOCK": 1024}


SMALL = [_norm, _gate, _rope_kv, _rope, _exit, _fill, _noise, _argmax, _silu, _runs, _share, _tiles, _starters, _put]


@pytest.mark.parametrize("case", SMALL, ids=[case.__name__.strip("_") for case in SMALL])
def test_small_kernels_keep_everything_in_registers(case: Any, tmp_path: Path) -> None:
    kernel, arguments, constants = case()
    found = compiled(kernel, arguments, constants, tmp_path, num_warps=4)
    assert (0, 0) == (found.stack_bytes, found.spills)
