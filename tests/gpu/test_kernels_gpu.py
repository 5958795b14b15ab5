"""Every kernel on the card, in bfloat16 at the models' shapes: errors, and bits across row counts and settings."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
MODELS = ("ouro", "huginn")
HOPPER_SHAPES = [(16, 16, 128, 16), (55, 55, 96, 16), (48, 8, 128, 16), (4, 2, 64, 32)]
PRODUCTS = ("qkv", "out", "gate_up", "down", "head")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_err_at_most_twice_as_much_as_plain_torch(model: str, name: str) -> None:
    from epicycle.engine.kernels.bench import checks, shapes

    report = checks.check_product(getattr(shapes.SHAPES[model], name))
    assert report["ok"], report


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_row_of_a_product_has_the_same_bits_in_every_configuration_at_every_number_of_rows(
    model: str, name: str
) -> None:
    from epicycle.engine.kernels.bench import checks, shapes

    kind = getattr(shapes.SHAPES[model], name)
    report = checks.check_product_bits(kind, checks.all_candidates(kind))
    assert report["ok"], report


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("check", ["check_norms", "check_prompt"])
def test_norms_and_prompt_attention_are_exact_and_invariant(model: str, check: str) -> None:
    from epicycle.engine.kernels.bench import checks, shapes

    run: Callable[[shapes.Shape], checks.Report] = getattr(checks, check)
    report = run(shapes.SHAPES[model])
    assert report["ok"], report


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("run", [0, 128, 1024])
def test_decode_attention_is_exact_and_invariant(model: str, run: int) -> None:
    from epicycle.engine.kernels.bench import checks, shapes

    report = checks.check_decode(shapes.SHAPES[model], run)
    assert report["ok"], report


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(16, 16, 128), (55, 55, 96), (48, 8, 128), (4, 2, 32)])
def test_attention_of_one_row_may_begin_early_with_the_same_bits(heads: int, kv_heads: int, width: int) -> None:
    import torch

    from epicycle.engine.kernels.early_check import early_holds
    from epicycle.engine.kernels.triton_common import starts_early

    device = torch.device("cuda", torch.cuda.current_device())
    if not starts_early(device):
        pytest.skip("this card starts no launch early")
    for pairs in (False, True):
        assert early_holds(heads, kv_heads, width, 16, pairs, torch.bfloat16, device)


@pytest.mark.parametrize(("heads", "kv_heads", "width", "page_tokens"), HOPPER_SHAPES)
def test_prompts_and_decode_rows_that_share_the_card_have_the_bits_they_have_in_turn(
    heads: int, kv_heads: int, width: int, page_tokens: int
) -> None:
    import torch

    from epicycle.engine.kernels.hopper_prompt_triton import takes
    from epicycle.engine.kernels.share_check import share_holds

    device = torch.device("cuda", torch.cuda.current_device())
    if not takes(width, page_tokens, torch.bfloat16, device):
        pytest.skip("this card has no kernel that shares it")
    assert share_holds(heads, kv_heads, width, page_tokens, torch.bfloat16, device)


@pytest.mark.parametrize(("heads", "kv_heads", "width", "page_tokens"), HOPPER_SHAPES)
def test_prompts_of_a_hopper_card_have_the_bits_of_the_kernel_for_all(
    heads: int, kv_heads: int, width: int, page_tokens: int
) -> None:
    import torch

    from epicycle.engine.kernels.hopper_prompt_triton import takes
    from epicycle.engine.kernels.prompt_check import hopper_prompt_holds

    device = torch.device("cuda", torch.cuda.current_device())
    if not takes(width, page_tokens, torch.bfloat16, device):
        pytest.skip("this card isn't a Hopper")
    assert hopper_prompt_holds(heads, kv_heads, width, page_tokens, torch.bfloat16, device)


def test_ouro_s_products_that_turn_their_rows_have_their_bits_at_any_number_of_rows() -> None:
    import torch

    from epicycle.engine.kernels.bench import checks, shapes
    from epicycle.engine.kernels.triton_common import multiplies_in_groups

    if not multiplies_in_groups(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("this card isn't a Hopper")
    report = checks.check_turned(shapes.OURO)
    assert report["ok"], report


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(16, 16, 128), (6, 2, 128), (5, 3, 128), (4, 2, 64)])
def test_products_that_turn_their_rows_leave_the_bits_of_a_launch_behind_them(
    heads: int, kv_heads: int, width: int
) -> None:
    import torch

    from epicycle.engine.kernels.candidates import TURNED, can_turn
    from epicycle.engine.kernels.products import Product
    from epicycle.engine.kernels.triton_common import multiplies_in_groups
    from epicycle.engine.kernels.turned_check import Heads, is_equal

    device = torch.device("cuda", torch.cuda.current_device())
    if not multiplies_in_groups(device):
        pytest.skip("this card isn't a Hopper")
    qkv = Product("qkv", (heads + 2 * kv_heads) * width, 1024)
    configs = [config for config in TURNED if can_turn(config, qkv, heads, kv_heads, width)]
    assert configs
    for config in configs:
        for rows in (1, 130, 1000):
            assert is_equal(config, qkv, Heads(heads, kv_heads, width), rows, torch.bfloat16, device)


def test_addresses_beyond_two_to_the_31st_element_are_right() -> None:
    from epicycle.engine.kernels.bench import checks

    report = checks.check_far_addresses()
    assert report["ok"], report
