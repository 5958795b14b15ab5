"""The facts that two executors must share to exchange KV, and the arithmetic of what they exchange."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from epicycle.engine.engine import Engine
from epicycle.engine.transfer.blocks import block_shape
from epicycle.engine.transfer.facts import facts_of, weights_checksum
from epicycle.kvstore.geometry import KvGeometry
from epicycle.kvstore.layouts import build_layout
from epicycle.transport.config import TransferConfig
from epicycle.transport.wire.transfer import TransferFacts, mismatch
from tests.fakes.serving import tiny_engine, tiny_folder

CONFIG = TransferConfig(connector="nixl")


def facts(engine: Engine) -> TransferFacts:
    return facts_of(engine, CONFIG, engine.capabilities().fingerprint)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models"), "huginn_raven")


def test_engines_of_equal_options_agree_whatever_their_size(folder: Path) -> None:
    large, small = tiny_engine(folder), tiny_engine(folder, slots=2, kv_memory_bytes=1 << 20)
    assert "" == mismatch(facts(large), facts(small))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"kv_layout": "shared"}, "layout"),
        ({"page_tokens": 8}, "layout"),
        ({"pack_recurrent_planes": False}, "live_slots"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"loops": 3}, "model"),
        ({"numerics": "fast"}, "numerics"),
        ({"start_state": "zero"}, "model"),
        ({"weights": "random"}, "weights"),
    ],
)
def test_what_differs_is_named_with_both_values(folder: Path, options: dict[str, object], name: str) -> None:
    ours, theirs = facts(tiny_engine(folder)), facts(tiny_engine(folder, **options))
    told = mismatch(ours, theirs)
    assert f"{name} is {getattr(ours, name)!r} here and {getattr(theirs, name)!r} there" in told


def test_one_bit_of_one_weight_changes_the_checksum(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    before = weights_checksum(weights)
    assert before == weights_checksum(dict(reversed(weights.items())))
    changed = weights | {"transformer.ln_f.weight": weights["transformer.ln_f.weight"].clone()}
    changed["transformer.ln_f.weight"].view(torch.int32)[3] ^= 1
    assert before != weights_checksum(changed)


def test_another_file_has_another_fingerprint(folder: Path, tmp_path: Path) -> None:
    other = tiny_folder(tmp_path, "huginn_raven")
    weights = load_file(other / "model.safetensors")
    weights["transformer.ln_f.weight"][0] += 1
    save_file(weights, other / "model.safetensors")
    told = mismatch(facts(tiny_engine(folder)), facts(tiny_engine(other)))
    assert "weights is" in told
    assert "weights_checksum is" in told


def test_every_fact_is_compared() -> None:
    plain = TransferFacts(*(name for name in TransferFacts.__struct_fields__))
    for name in TransferFacts.__struct_fields__:
        assert f"{name} is {name!r} here and 'other' there" == mismatch(
            plain, msgspec.structs.replace(plain, **{name: "other"})
        )


@pytest.mark.parametrize(
    ("packed", "once", "first", "recurrent", "loops", "heads", "width", "expected"),
    [
        (True, 4, 2, 4, 32, 55, 96, 2_787_840),  # Huginn-0125
        (False, 4, 2, 4, 32, 55, 96, 2_787_840),  # the same: cells that no loop writes stay where they are
        (True, 0, 0, 24, 4, 16, 128, 786_432),  # Ouro-1.4B
    ],
)
def test_bytes_of_a_prompt_token(
    packed: bool, once: int, first: int, recurrent: int, loops: int, heads: int, width: int, expected: int
) -> None:
    geometry = KvGeometry(
        layers=once + recurrent,
        first_recurrent=first,
        recurrent_layers=recurrent,
        loops=loops,
        kv_heads=heads,
        head_dim=width,
        element_bytes=2,
        page_tokens=16,
    )
    shape = block_shape(build_layout("last_exited", geometry, packed=packed).facts, geometry, 0)
    assert 16 * expected == sum(shape.unit_bytes(plane, 16) for plane in range(loops))
