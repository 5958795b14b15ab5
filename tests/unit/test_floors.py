"""The floors' arithmetic, against the published numbers of the two models on an H200."""

from __future__ import annotations

import pytest

from epicycle.engine.models.config import read_spec
from epicycle.engine.models.locate import locate
from epicycle.tools.floors import RATES, DeviceRates, Floors, SequenceSize, rates_of

H200 = RATES["H200"]


@pytest.fixture(scope="module")
def ouro() -> Floors:
    return Floors(read_spec(locate("ouro-1.4b", "random").folder))


@pytest.fixture(scope="module")
def huginn() -> Floors:
    return Floors(read_spec(locate("huginn-0125", "random").folder))


def serial_tokens_per_s(floors: Floors, streams: int, prompt: int, output: int) -> float:
    sizes = [SequenceSize(prompt, output, floors.spec.loops)] * streams
    return streams * output / floors.serial_s(H200, sizes, streams)


def test_weight_bytes_of_a_decoded_token(ouro: Floors, huginn: Floors) -> None:
    assert 10.07e9 == pytest.approx(ouro.weight_bytes(4), rel=0.001)
    assert 108.65e9 == pytest.approx(huginn.weight_bytes(32), rel=0.001)


def test_kv_bytes_read_per_loop_and_context_token(ouro: Floors, huginn: Floors) -> None:
    assert 196_608 == ouro.kv_bytes_per_loop
    assert 84_480 == huginn.kv_bytes_per_loop


def test_layers_that_run_once_read_their_kv_once(huginn: Floors) -> None:
    assert 10 * (32 * 84_480 + 84_480) == huginn.kv_bytes(context=10, loops=32)


def test_prompt_operations(ouro: Floors, huginn: Floors) -> None:
    assert 9.9e9 == pytest.approx(ouro.prompt_token_flop, rel=0.01)
    assert 108e9 == pytest.approx(huginn.prompt_token_flop, rel=0.01)


def test_attention_of_a_prompt_grows_with_its_square(ouro: Floors) -> None:
    def attention(prompt: int) -> float:
        head = 2 * 49_152 * 2048
        return ouro.prompt_flop(prompt) - prompt * ouro.prompt_token_flop - head

    assert 4 * 2048 * 96 == attention(1)
    assert 4.0 == pytest.approx(attention(20_000) / attention(10_000), rel=0.001)


@pytest.mark.parametrize(("context", "expected"), [(0, 417), (1024, 385)])
def test_one_ouro_row(ouro: Floors, context: int, expected: float) -> None:
    assert expected == pytest.approx(1 / ouro.decode_s(H200, context, 4), rel=0.005)


def test_one_huginn_row(huginn: Floors) -> None:
    assert 38.7 == pytest.approx(1 / huginn.decode_s(H200, 0, 32), rel=0.005)


@pytest.mark.parametrize(
    ("streams", "prompt", "output", "expected"), [(32, 1024, 128, 2596), (128, 1024, 128, 3035), (32, 2048, 64, 1100)]
)
def test_serial_floors_of_ouro(ouro: Floors, streams: int, prompt: int, output: int, expected: float) -> None:
    assert expected == pytest.approx(serial_tokens_per_s(ouro, streams, prompt, output), rel=0.01)


@pytest.mark.parametrize(("streams", "expected"), [(1, 37), (8, 213), (32, 434), (64, 525)])
def test_serial_floors_of_huginn(huginn: Floors, streams: int, expected: float) -> None:
    assert expected == pytest.approx(serial_tokens_per_s(huginn, streams, 512, 64), rel=0.02)


def test_early_exit_lowers_the_decode_part_only(ouro: Floors) -> None:
    full = ouro.serial_s(H200, [SequenceSize(1024, 1, 4.0)], 1)
    shallow = ouro.serial_s(H200, [SequenceSize(1024, 1, 2.0)], 1)
    assert full == shallow
    assert ouro.serial_s(H200, [SequenceSize(1024, 2, 4.0)], 1) > ouro.serial_s(H200, [SequenceSize(1024, 2, 2.0)], 1)


def test_rates_are_found_by_a_part_of_the_device_name() -> None:
    assert H200 == rates_of("NVIDIA H200 NVL")


def test_given_rates_win_and_an_unknown_device_has_none() -> None:
    assert DeviceRates(1e12, 755e12) == rates_of("NVIDIA H200", bytes_per_s=1e12)
    assert rates_of("a CPU") is None
    assert rates_of("a CPU", bytes_per_s=1e10) is None
    assert DeviceRates(1e10, 1e11) == rates_of("a CPU", 1e10, 1e11)
