"""Every KV layout reads the versions it promises: the pump against a dense oracle that runs token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from epicycle.engine.engine import Engine
from epicycle.engine.kernels.plain import PlainOps
from epicycle.engine.models.build import assemble
from epicycle.engine.setup import make_layout
from epicycle.kvstore.layouts import KvLayout
from epicycle.transport.config import EngineConfig
from epicycle.transport.wire.request import LoopBounds, Sampling
from tests.fakes.rows import SequenceCache
from tests.fakes.serving import Ask, floats, serve_all, tiny_engine, tiny_folder
from tests.fakes.tiny_models import CONFIGS, lively_weights, spec_of

PROMPT = [5, 9, 33, 2, 41, 17, 60, 3, 3]
COUNT = 10
LAYOUTS = ("last_exited", "shared", "budgeted:2", "budgeted:3")


class OneRow:
    """One token of one sequence; its cache keeps every loop's version, and the layout says which one a query reads."""

    def __init__(self, cache: SequenceCache, layout: KvLayout, position: int) -> None:
        self.cache = cache
        self.layout = layout
        self.positions = torch.tensor([position])
        self.depths = torch.tensor([0])
        self.noise_seeds = torch.tensor([0])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        depth = int(self.depths)
        exits = self.cache.last[: int(self.positions)].tolist()
        return self._attend(layer, q, k, v, depth, [self.layout.read_version(depth, exited) for exited in exits])

    def attend_once(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attend(layer, q, k, v, 0, [0] * int(self.positions))

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, depth: int, versions: list[int]) -> Tensor:
        cache, position = self.cache, int(self.positions)
        cache.keys[layer][depth, position], cache.values[layer][depth, position] = k[0], v[0]
        index = (torch.tensor([*versions, depth]), torch.arange(position + 1))
        group = cache.spec.heads // cache.spec.kv_heads
        keys, values = (x[layer][index].repeat_interleave(group, dim=1) for x in (cache.keys, cache.values))
        scores = torch.einsum("hd,phd->hp", q[0], keys) * cache.spec.head_dim**-0.5
        return torch.einsum("hp,phd->hd", scores.softmax(dim=-1), values).unsqueeze(0)


def oracle(name: str, layout_name: str, depths: list[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens and their logprobs when output i leaves after depths[i] loops."""
    spec = spec_of(CONFIGS[name])
    model = assemble(spec, lively_weights(spec), PlainOps(), "zero")
    layout = make_layout(EngineConfig(kv_layout=layout_name), spec, torch.float32)
    cache = SequenceCache(spec, len(PROMPT) + COUNT)
    tokens, logprobs, fed = [], [], list(PROMPT)
    loops = [spec.loops] * len(PROMPT) + depths[1:]
    for position, depth in enumerate(loops):
        rows = OneRow(cache, layout, position)
        state = model.prelude(torch.tensor([fed[position]]), rows)
        for loop in range(depth):
            rows.depths = torch.tensor([loop])
            state, _ = model.loop(state, rows)
        cache.last[position] = depth - 1
        scores = model.head(model.coda(state, rows))[0].log_softmax(-1)
        if position >= len(PROMPT) - 1:
            tokens.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
            fed.append(tokens[-1])
    return tokens, logprobs


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("models")
    return {name: tiny_folder(parent, name) for name in CONFIGS}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", list(CONFIGS))
def test_the_pump_equals_the_dense_oracle(folders: dict[str, Path], name: str, layout: str) -> None:
    rule = "latent_diff" if name == "huginn_raven" else "random_lookahead" if name == "nanbeige" else "ouro"
    engine: Engine = tiny_engine(folders[name], kv_layout=layout, exit_rule=rule, start_state="zero", lookahead_seed=5)
    sampling = Sampling(max_tokens=COUNT, temperature=0.0, logprobs=0)
    outcome = serve_all(engine, [Ask(PROMPT, sampling, LoopBounds(min_loops=1, exit_threshold=0.5))])[0]
    tokens, logprobs = oracle(name, layout, outcome.depths)
    assert tokens == outcome.tokens
    assert floats(outcome.logprobs) == pytest.approx(logprobs, abs=2e-4)
    assert engine.spec.loops == outcome.depths[0]


def test_layouts_with_fewer_planes_are_other_models(folders: dict[str, Path]) -> None:
    sampling = Sampling(max_tokens=COUNT, temperature=0.0, logprobs=0)
    ask = Ask(PROMPT, sampling, LoopBounds(min_loops=1, exit_threshold=0.5))
    outcomes = [serve_all(tiny_engine(folders["ouro"], kv_layout=layout), [ask])[0] for layout in LAYOUTS]
    assert len(LAYOUTS) == len({outcome.logprobs for outcome in outcomes})
    assert all(len(set(outcome.depths)) > 1 for outcome in outcomes)
