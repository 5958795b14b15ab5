"""Whole loops of tiny models through the kernels, held to the CPU's plain operations and attention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from epicycle.engine import paged_attention
from epicycle.engine.frame import Frame, FrameAttention, PlainAttention
from epicycle.engine.kernels.candidates import TURNED
from epicycle.engine.kernels.ops import Ops
from epicycle.engine.kernels.plain import PlainOps
from epicycle.engine.kernels.products import GemmConfig
from epicycle.engine.kernels.rope_kv_triton import Turning
from epicycle.engine.kernels.triton_ops import TritonOps
from epicycle.engine.kernels.turned_triton import TurnedRows, plain_turned
from epicycle.engine.models.base import LoopedModel
from epicycle.engine.models.fused import fuse, fuse_ends
from epicycle.engine.models.huginn import HuginnModel
from epicycle.engine.models.ouro import OuroModel
from epicycle.engine.models.spec import ModelSpec
from epicycle.engine.paged_attention import PagedAttention
from epicycle.engine.pool import KvPool
from epicycle.kvstore.geometry import KvGeometry
from epicycle.kvstore.layouts import build_layout
from tests.fakes.tiny_models import HUGINN, OURO, lively_weights, spec_of

# What is computed for rows that aren't live may overflow, and the interpreter wraps 64-bit products with a word.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

MakeAttention = Callable[[KvPool, int], FrameAttention]  # of a pool and that many query heads
MODELS = {"ouro": (OURO, OuroModel), "huginn_raven": (HUGINN, HuginnModel)}
TABLE = torch.randperm(12, generator=torch.Generator().manual_seed(0)).view(3, 4).to(torch.int32)


def make_pool(spec: ModelSpec) -> KvPool:
    geometry = KvGeometry(
        layers=spec.layers,
        first_recurrent=spec.first_recurrent,
        recurrent_layers=spec.recurrent_layers,
        loops=spec.loops,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        element_bytes=4,
        page_tokens=16,
    )
    return KvPool(build_layout("last_exited", geometry), 12, torch.float32, torch.device("cpu"))


def frame(entries: list[tuple[int, int, int]], decode_rows: int, chunks: list[tuple[int, int]]) -> Frame:
    """(slot, position, end) of each row, all at depth 0; one row behind them that isn't live."""
    columns = torch.tensor([*entries, entries[0]]).T.contiguous()
    return Frame(
        decode_rows=decode_rows,
        prompt_rows=len(entries) + 1 - decode_rows,
        slots=columns[0],
        positions=columns[1],
        depths=torch.zeros_like(columns[0]),
        noise_seeds=columns[0],
        ends=columns[2],
        live=torch.arange(len(entries) + 1) < len(entries),
        chunks=torch.tensor([*chunks, (len(entries) - decode_rows, 0)]).T.contiguous(),
    )


PROMPTS = frame([(0, p, 18) for p in range(18)] + [(1, p, 3) for p in range(3)], 0, [(0, 18), (18, 3)])
MIXED = frame([(0, 18, 19), (1, 3, 4), *((2, p, 5) for p in range(5))], 2, [(0, 5)])


def plain(pool: KvPool, heads: int) -> PlainAttention:
    return PlainAttention(pool, TABLE)


def paged(pool: KvPool, heads: int) -> PagedAttention:
    return PagedAttention(pool, TABLE, heads, decode_rows=2, prompt_rows=32)


def one_loop_of_each(model: LoopedModel, make_attention: MakeAttention) -> tuple[Tensor, KvPool]:
    """Two prompts, then two decode rows with a third prompt; the states of live rows after one loop."""
    pool, states = make_pool(model.spec), []
    attention = make_attention(pool, model.spec.heads)
    for rows in (PROMPTS, MIXED):
        traversal = attention.rows(rows)
        tokens = (7 * rows.positions + rows.slots) % model.spec.vocab_size
        state, _ = model.loop(model.prelude(tokens, traversal), traversal)
        states.append(state[rows.live])
    return torch.cat(states), pool


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_through_the_kernels_what_it_computes_on_the_cpu(name: str) -> None:
    config, build = MODELS[name]
    spec = spec_of(config)

    def model(ops: Ops) -> LoopedModel:
        return build(spec, lively_weights(spec), ops)

    expected, expected_pool = one_loop_of_each(model(PlainOps()), plain)
    actual, pool = one_loop_of_each(model(TritonOps()), paged)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-4)
    torch.testing.assert_close(pool.k, expected_pool.k, atol=2e-5, rtol=2e-4)
    torch.testing.assert_close(pool.v, expected_pool.v, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("is_fused", [False, True])
def test_decode_rows_are_attended_to_right_behind_prompts_by_a_launch_that_may_run_beside_them(
    is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads what was complete before prompts' launch began, and nothing that anybody else writes."""
    found: list[str] = []

    def watched(name: str) -> None:
        launch: Callable[..., object] = getattr(paged_attention, name)

        def record(*arguments: object, **options: object) -> object:
            found.append(name + " beside" * bool(options.get("beside")))
            return launch(*arguments, **{**options, **({"beside": False} if "beside" in options else {})})

        monkeypatch.setattr(paged_attention, name, record)

    for name in ("rope_kv", "write_kv", "prompt_attention", "decode_attention"):
        watched(name)
    spec = spec_of(OURO)
    ops = TritonOps()
    model = OuroModel(spec, lively_weights(spec), ops)
    attention = paged(make_pool(spec), spec.heads)
    attention.shares_card = True
    traversal = attention.rows(MIXED)
    loop = fuse(model, ops) if is_fused else model.loop
    loop(model.prelude(MIXED.positions, traversal), traversal)
    layer = ["rope_kv" if is_fused else "write_kv", "prompt_attention", "decode_attention beside"]
    assert layer * spec.layers == found


def test_which_kernels_attend_is_told() -> None:
    attention = paged(make_pool(spec_of(OURO)), 4)
    off = "attention kernels: Hopper's for prompts no, card shared with decode rows no, lone rows read ahead no"
    assert off == attention.line()
    attention.shares_card = True
    assert "card shared with decode rows yes" in attention.line()


@pytest.mark.parametrize(
    ("prompt_rows", "context", "expected"),
    [(0, 1024, False), (64, 4096, False), (128, 4096, True), (512, 65536, False), (2048, 65536, True)],
)
def test_prompts_are_attended_to_beside_decode_rows_where_no_few_of_their_programs_are_long(
    prompt_rows: int, context: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "multiprocessors", lambda device: 132)
    pool = make_pool(spec_of(MODELS["ouro"][0]))
    table = torch.zeros(1, context // pool.page_tokens, dtype=torch.int32)
    attention = PagedAttention(pool, table, 16, decode_rows=1, prompt_rows=2048)
    assert expected == attention.forks(1, prompt_rows)
    assert not attention.forks(0, prompt_rows)


def test_fused_ends_have_the_bits_of_the_model_s_and_leave_out_rows_beyond_the_count() -> None:
    spec, ops = spec_of(HUGINN), TritonOps()
    model = HuginnModel(spec, lively_weights(spec), ops)
    states = torch.randn(3, spec.state_width, generator=torch.Generator().manual_seed(1))
    tokens, count = torch.tensor([5, 40, 7]), torch.tensor([2], dtype=torch.int32)
    rows = frame([(0, 17, 18), (1, 2, 3)], 3, [])
    ends = fuse_ends(model, ops)
    assert ends is not None
    found = []
    for is_fused in (False, True):
        pool = make_pool(spec)
        traversal = PagedAttention(pool, TABLE, spec.heads, decode_rows=3, prompt_rows=16, turns_pairs=True).rows(rows)
        if is_fused:
            before, after = ends[0](tokens, traversal, count), ends[1](states, traversal, count)
        else:
            before, after = model.prelude(tokens, traversal), model.coda(states, traversal)
        found.append((before[:2], after[:2], pool.k, pool.v))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


class _TurningOps(TritonOps):
    """Whose QKV products turn their rows, as on a card that has such products."""

    def find_turned(self, weight: Tensor, rows: int) -> GemmConfig | None:
        return TURNED[0]

    def turn(self, x: Tensor, weight: Tensor, config: GemmConfig, turned: TurnedRows) -> Tensor:
        plain_turned(self.product(x, weight), turned)
        return turned.q


def test_products_that_turn_their_rows_leave_what_a_launch_behind_them_does() -> None:
    spec, found = spec_of(MODELS["ouro"][0]), []
    for ops in (TritonOps(), _TurningOps()):
        model = OuroModel(spec, lively_weights(spec), ops)
        loop, pool, states = fuse(model, ops), make_pool(spec), []
        assert loop is not None
        attention = PagedAttention(pool, TABLE, spec.heads, decode_rows=2, prompt_rows=32, turns_pairs=False)
        for rows in (PROMPTS, MIXED):
            tokens = (7 * rows.positions + rows.slots) % spec.vocab_size
            state, _ = loop(model.prelude(tokens, attention.rows(rows)), attention.rows(rows))
            states.append(state[rows.live])
        found.append((torch.cat(states), pool.k, pool.v))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)  # rotation by torch and by a kernel


@pytest.mark.parametrize(("early_rows", "forks"), [(8, 0), (7, 1)])
def test_rows_whose_next_product_may_start_early_are_attended_to_in_turn(
    early_rows: int, forks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(MODELS["ouro"][0])
    attention, forked = paged(make_pool(spec), spec.heads), []

    def fork() -> AbstractContextManager[None]:
        forked.append(True)
        return nullcontext()

    monkeypatch.setattr(paged_attention, "EARLY_ROWS", early_rows)
    monkeypatch.setattr(attention.side, "forked", fork)
    model = OuroModel(spec, lively_weights(spec), PlainOps())
    qkv = torch.randn(8, (spec.heads + 2 * spec.kv_heads) * spec.head_dim)
    attention.rows(MIXED).attend_product(0, qkv, Turning(model.cos, model.sin, False))
    assert forks == len(forked)
