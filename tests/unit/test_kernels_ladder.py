"""The choice of implementations: fastest of the bit-equal, and the sure one otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from epicycle.engine.kernels.candidates import TURNED, can_turn, candidates, sure, untimed
from epicycle.engine.kernels.ladder import LATE_US, STEPS, choose, step_for
from epicycle.engine.kernels.products import EXACT, LIBRARY, GemmConfig, Product, canonical_chunks

PLAIN = Product("plain", 6144, 2048)
STREAMS = [config for config in candidates(PLAIN, 1) if config.kernel == "stream"][:2]


@dataclass
class FakeProbe:
    """Times from a table (default 10), and a set of keys whose bits are wrong."""

    times_us: dict[str, float] = field(default_factory=dict)
    unequal: set[str] = field(default_factory=set)
    compared: list[str] = field(default_factory=list)

    def is_equal(self, product: Product, config: GemmConfig, rows: int) -> bool:
        self.compared.append(config.key)
        return config.key not in self.unequal

    def time_us(self, product: Product, config: GemmConfig, rows: int) -> float:
        return self.times_us.get(config.key, 10.0)


def test_the_fastest_equal_implementation_is_picked() -> None:
    fast = candidates(PLAIN, 16)[3]
    choices = choose([PLAIN], [16], FakeProbe({fast.key: 1.0, LIBRARY.key: 2.0}))
    assert fast == choices.get(PLAIN, 9)


def test_a_faster_one_with_other_bits_is_refused_and_named() -> None:
    probe = FakeProbe({LIBRARY.key: 1.0}, {LIBRARY.key})
    choices = choose([PLAIN], [16], probe)
    assert LIBRARY != choices.get(PLAIN, 16)
    assert [("plain", 16, LIBRARY.key)] == choices.refused


def test_the_sure_one_is_left_when_every_other_has_other_bits() -> None:
    every = {config.key for config in candidates(PLAIN, 16)}
    assert sure(PLAIN) == choose([PLAIN], [16], FakeProbe(unequal=every)).get(PLAIN, 16)


def test_where_bits_are_free_the_fastest_is_picked_uncompared_the_library_for_split_products_too() -> None:
    split = Product("split", 2048, 5632, chunks=4)
    probe = FakeProbe({LIBRARY.key: 1.0}, {LIBRARY.key})
    assert [LIBRARY] * 2 == [choose([it], [16], probe, keeps_bits=False).get(it, 16) for it in (PLAIN, split)]
    assert [] == probe.compared


def test_what_was_picked_is_told_by_product_and_step_and_what_turns_its_rows_instead() -> None:
    choices = choose([PLAIN], [64, 512], FakeProbe({LIBRARY.key: 1.0}))
    choices.turned[PLAIN.name, 512] = TURNED[0]
    assert {"plain": {"64": LIBRARY.key, "512": TURNED[0].key}} == choices.told()


def test_between_steps_the_library_gets_the_rows_that_agree_as_they_are_and_others_padded() -> None:
    choices = choose([PLAIN], [64, 512], FakeProbe({LIBRARY.key: 1.0}))
    choices.exact[PLAIN.name] = frozenset({48})
    assert [EXACT, LIBRARY, LIBRARY] == [choices.get(PLAIN, rows) for rows in (48, 49, 64)]
    choices.picked[PLAIN.name, 64] = sure(PLAIN)
    assert sure(PLAIN) == choices.get(PLAIN, 48)


def test_what_cannot_run_is_neither_compared_nor_picked() -> None:
    probe = FakeProbe({config.key: float("inf") for config in candidates(PLAIN, 2048)})
    assert sure(PLAIN) == choose([PLAIN], [2048], probe).get(PLAIN, 2048)
    assert [] == probe.compared


def test_rows_use_the_first_step_that_holds_them() -> None:
    assert [1, 16, 16, 4096, 4096] == [step_for(rows) for rows in (1, 2, 16, 2049, 9999)]


def test_products_in_chunks_never_go_to_the_library() -> None:
    split = Product("split", 2048, 5632, chunks=4)
    assert all(LIBRARY not in candidates(split, step) for step in STEPS)


def test_float_products_never_go_to_the_tile_kernel() -> None:
    head = Product("head", 49152, 2048, "float")
    assert {"stream", "library", "tile"} > {config.kernel for step in STEPS for config in candidates(head, step)}


def test_only_few_rows_are_for_early_kernels_and_never_where_a_count_decides() -> None:
    head, shapes = Product("head", 49152, 2048, "float"), (PLAIN, Product("split", 2048, 5632, chunks=4))
    tried = {step: {config.kernel for shape in shapes for config in candidates(shape, step)} for step in STEPS}
    assert [1] == [step for step in STEPS if "early" in tried[step]]
    assert [16, 32, 64, 128] == [step for step in STEPS if "rows" in tried[step]]
    assert {"early", "rows"}.isdisjoint(config.kernel for step in STEPS for config in candidates(head, step))


def test_rings_of_early_kernels_leave_little_of_a_multiprocessor_and_need_lines_of_16_bytes() -> None:
    for product in (PLAIN, Product("split", 2048, 5632, chunks=4), Product("pair", 5632, 2048, "pair")):
        tiles = 2 if product.epilogue == "pair" else 1
        for step in (16, 32, 64, 128)[: 3 if product is PLAIN else 4]:
            found = [config for config in candidates(product, step) if config.kernel == "rows"]
            assert found and all(config.block_m == step for config in found)
            for config in found:
                lines = tiles * config.stages * config.block_n + config.x_stages * config.block_m
                assert 150 << 10 <= 2 * config.block_k * lines <= 220 << 10
    odd = Product("odd", 6144, 2044)
    assert all(config.kernel != "rows" for step in STEPS for config in candidates(odd, step))


def test_many_rows_of_a_plain_product_leave_room_for_the_attention_behind_it() -> None:
    assert all(config.kernel != "rows" for config in candidates(PLAIN, 128))


@pytest.mark.parametrize(("step", "expected"), [(128, "rows"), (256, "library")])
def test_a_launch_that_is_not_early_must_win_more_than_it_loses_at_either_end(step: int, expected: str) -> None:
    pair = Product("pair", 5632, 2048, "pair")
    rows = next(config for config in candidates(pair, 128) if config.kernel == "rows")
    probe = FakeProbe({LIBRARY.key: 5.0, rows.key: 5.0 + LATE_US / 2})
    assert expected == choose([pair], [step], probe).get(pair, step).kernel


def test_a_counted_product_takes_the_fastest_equal_one_that_reads_a_count() -> None:
    early, (few, other) = candidates(PLAIN, 1)[0], STREAMS
    probe = FakeProbe({early.key: 1.0, few.key: 2.0, other.key: 3.0}, unequal={few.key})
    choices = choose([PLAIN], [1], probe)
    assert early.kernel == "early"
    assert (early, other) == (choices.find(PLAIN, 1), choices.find_counted(PLAIN, 1))
    assert choices.find_counted(PLAIN, 2) is None


def test_two_accumulators_fit_the_register_file() -> None:
    pair = Product("pair", 5632, 2048, "pair")
    tiles = [config for step in STEPS for config in candidates(pair, step) if config.kernel in ("stream", "tile")]
    assert all(2 * config.block_m * config.block_n <= 128 * 32 * config.warps for config in tiles)


def test_tiles_that_turn_hold_whole_heads_and_more_steps_than_the_ring_has_slots() -> None:
    def found(heads: int, kv_heads: int, width: int, inputs: int = 2048, chunks: int = 1) -> set[str]:
        qkv = Product("qkv", (heads + 2 * kv_heads) * width, inputs, chunks=chunks)
        return {config.key for config in TURNED if can_turn(config, qkv, heads, kv_heads, width)}

    pair, one = "turned-128x256x64-w8s3", "turned-128x128x64-w8s5"
    assert {pair, one} == found(16, 16, 128)
    assert {one} == found(5, 3, 128)
    assert {one, "turned-128x128x64-w8s6"} == found(4, 2, 64)
    assert {pair} == found(4, 4, 128, inputs=256)
    assert set() == found(55, 55, 96) == found(16, 16, 128, chunks=4) == found(5, 3, 64)


def test_wide_tiles_are_for_many_rows_and_their_rings_fill_shared_memory() -> None:
    split, pair = Product("split", 2048, 5632, chunks=4), Product("pair", 5632, 2048, "pair")

    def found(product: Product, step: int) -> set[str]:
        return {config.key for config in candidates(product, step) if config.kernel.startswith("wide")}

    assert all(not found(product, step) for product in (split, pair, PLAIN) for step in STEPS if step < 256)
    assert {"wide-128x128x64-w8s6", "wide-128x256x64-w8s3"} == found(split, 2048) == found(PLAIN, 2048)
    assert found(split, 2048) | {"wide-128x64x64-w8s8", "wide-parts-128x128x64-w8s7"} == found(split, 512)
    assert {"wide-128x128x64-w8s6", "wide-128x256x64-w8s4"} == found(pair, 512)


def test_every_product_has_something_to_run_untimed() -> None:
    head = Product("head", 49152, 2048, "float")
    for product in (PLAIN, head, Product("split", 2048, 5632, chunks=4), Product("pair", 5632, 2048, "pair")):
        for rows in (1, 17, 100, 300, 5000):
            assert LIBRARY != untimed(product, rows)


def test_only_narrow_deep_products_are_summed_in_parts() -> None:
    shapes = [(2048, 2048), (2048, 5632), (6144, 2048), (5280, 17920), (256, 256)]
    assert [4, 4, 1, 1, 1] == [canonical_chunks(*shape) for shape in shapes]
