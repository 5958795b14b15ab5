"""A scheduler of a few lines that drives a real `Pump`: it hands out slots and pages and collects what comes back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import save_file

from epicycle.engine.engine import Engine
from epicycle.engine.pump import Pump
from epicycle.transport.config import EngineConfig
from epicycle.transport.wire.columns import F32, I32, U16, U64, pack, unpack, unpack_list
from epicycle.transport.wire.output import Fin, PrefixHit, PromptLogprobs, TokenBatch
from epicycle.transport.wire.plan import Evict, Grow, Join, Plan, StepReport
from epicycle.transport.wire.request import LoopBounds, Sampling
from tests.fakes.tiny_models import CONFIGS, lively_weights, spec_of

EPOCH = 3


@dataclass(frozen=True)
class Ask:
    """One request. `limit_tokens` None leases its whole life; `parts` are further fields of its Join."""

    prompt: Sequence[int]
    sampling: Sampling
    loops: LoopBounds = field(default_factory=LoopBounds)
    noise_seed: int = 0
    limit_tokens: int | None = None
    parts: Mapping[str, object] = field(default_factory=dict)

    @property
    def life_tokens(self) -> int:
        return len(self.prompt) + max(1, self.sampling.max_tokens) - 1


@dataclass
class Outcome:
    """All that a request's gateway would have seen; bits, so that equality means equality."""

    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    logprobs: bytes = b""
    top_ids: list[int] = field(default_factory=list)
    top_logprobs: bytes = b""
    prompt_logprobs: bytes = b""
    prompt_top_ids: list[int] = field(default_factory=list)
    scored_from: int | None = None
    cached_tokens: int = 0
    fin: Fin | None = None

    @property
    def reason(self) -> str:
        return self.fin.reason if self.fin else ""

    @property
    def bits(self) -> tuple[object, ...]:
        scores = (self.prompt_logprobs, tuple(self.prompt_top_ids), self.top_logprobs, tuple(self.top_ids))
        return (tuple(self.tokens), tuple(self.depths), self.logprobs, self.reason, *scores)


class Serving:
    """One pump over an engine. Requests wait here for a slot; `run` ends when all have ended."""

    def __init__(self, engine: Engine, pump: Pump | None = None) -> None:
        self.engine = engine
        self.pump = pump or engine.new_pump(EPOCH)
        self.outcomes: dict[int, Outcome] = {}
        self.reports: list[StepReport] = []
        self.slots = list(range(engine.plan.slots))
        self.pages = list(range(engine.plan.total_pages))
        self.gens = [0] * engine.plan.slots
        self.held: dict[int, tuple[int, list[int]]] = {}  # rid -> slot, pages
        self.tables: dict[int, list[int]] = {}  # pages by rid, ended or not
        self.waiting: list[tuple[int, Ask]] = []
        self._seq = 0
        self._next_rid = 1 << 40

    def submit(self, ask: Ask) -> int:
        rid = self._next_rid
        self._next_rid += 1
        self.outcomes[rid] = Outcome()
        self.waiting.append((rid, ask))
        return rid

    def plan(self, **parts: object) -> None:
        self._seq += 1
        self.pump.apply(Plan(epoch=EPOCH, seq=self._seq, **parts))  # type: ignore[arg-type]

    def admit(self) -> None:
        joins = []
        while self.waiting and self.slots:
            rid, ask = self.waiting.pop(0)
            joins.append(self._join(rid, ask))
        if joins:
            self.plan(joins=joins)

    def _join(self, rid: int, ask: Ask) -> Join:
        slot = self.slots.pop(0)
        self.gens[slot] += 1
        limit = ask.life_tokens if ask.limit_tokens is None else ask.limit_tokens
        pages = self.take_pages(-(-limit // self.engine.pool.page_tokens))
        self.held[rid], self.tables[rid] = (slot, pages), pages
        return Join(
            rid=rid,
            gateway=rid % 2,
            slot=slot,
            gen=self.gens[slot],
            prompt=pack(I32, ask.prompt),
            pages=pack(I32, pages),
            limit_tokens=limit,
            sampling=ask.sampling,
            loops=ask.loops,
            noise_seed=ask.noise_seed,
            queue_ms=1.5,
            **ask.parts,  # type: ignore[arg-type]
        )

    def take_pages(self, count: int) -> list[int]:
        taken, self.pages = self.pages[:count], self.pages[count:]
        assert len(taken) == count, "the test's pool is too small"
        return taken

    def grow(self, rid: int, tokens: int, is_final: bool = False) -> None:
        """Raise the lease of `rid` to `tokens` positions."""
        slot, pages = self.held[rid]
        more = self.take_pages(max(0, -(-tokens // self.engine.pool.page_tokens) - len(pages)))
        pages.extend(more)
        grow = Grow(slot=slot, gen=self.gens[slot], pages=pack(I32, more), limit_tokens=tokens, is_final=is_final)
        self.plan(grows=[grow])

    def evict(self, rid: int, reason: str = "cancelled") -> None:
        slot, _ = self.held[rid]
        self.plan(evicts=[Evict(slot=slot, gen=self.gens[slot], reason=reason)])

    def step(self) -> None:
        self.admit()
        self.pump.tick()
        self.collect()

    def collect(self) -> None:
        output = self.pump.collect()
        if output.report is not None:
            self.reports.append(output.report)
            self._free(output.report)
        for gateway, messages in output.to_gateways.items():
            for message in messages:
                self._receive(gateway, message)

    def run(self, most_steps: int = 20_000) -> None:
        for _ in range(most_steps):
            if all(outcome.fin for outcome in self.outcomes.values()):
                return
            self.step()
        raise AssertionError(f"not ended after {most_steps} steps: {self.outcomes}")

    def _free(self, report: StepReport) -> None:
        freed = list(zip(unpack_list(I32, report.freed_slots), unpack_list(I32, report.freed_gens), strict=True))
        for rid, (slot, pages) in list(self.held.items()):
            if (slot, self.gens[slot]) in freed:
                self.slots.append(slot)
                self.pages = pages + self.pages  # the last freed go out first, so that stale bytes are met
                del self.held[rid]

    def _receive(self, gateway: int, message: TokenBatch | PromptLogprobs | PrefixHit | Fin) -> None:
        if isinstance(message, TokenBatch):
            self._receive_tokens(gateway, message)
            return
        outcome = self.outcomes[message.rid]
        assert message.rid % 2 == gateway
        assert outcome.fin is None, "a message after the terminal"
        if isinstance(message, Fin):
            outcome.fin = message
            assert message.tokens == len(outcome.tokens)
        elif isinstance(message, PrefixHit):
            assert not outcome.tokens, "a hit is told before tokens"
            outcome.cached_tokens = message.tokens
        else:
            outcome.scored_from = outcome.scored_from or message.first
            assert message.first == outcome.scored_from + len(outcome.prompt_logprobs) // 4
            outcome.prompt_logprobs += message.logprobs
            outcome.prompt_top_ids += unpack_list(I32, message.top_ids)

    def _receive_tokens(self, gateway: int, batch: TokenBatch) -> None:
        rids = unpack(U64, batch.rids)
        wanted = unpack_list(I32, batch.logprob_k) or [-1] * len(rids)
        at, top = 0, 0
        for row, rid in enumerate(rids):
            outcome, k = self.outcomes[rid], wanted[row]
            assert rid % 2 == gateway
            assert outcome.fin is None, "a token after the terminal"
            assert unpack(I32, batch.first_index)[row] == len(outcome.tokens)
            outcome.tokens.append(unpack(I32, batch.tokens)[row])
            outcome.depths.append(unpack(U16, batch.exit_depths)[row])
            if k >= 0:
                outcome.logprobs += batch.logprobs[4 * at : 4 * at + 4]
                outcome.top_ids += unpack_list(I32, batch.top_ids)[top : top + k]
                outcome.top_logprobs += batch.top_logprobs[4 * top : 4 * (top + k)]
                at, top = at + 1, top + k


def serve_all(engine: Engine, asks: Sequence[Ask], *, chunk_tokens: int = 0) -> list[Outcome]:
    """Outcomes of requests submitted at once, in the order of `asks`."""
    serving = Serving(engine)
    if chunk_tokens:
        serving.pump._prompts.chunk_tokens = chunk_tokens
    rids = [serving.submit(ask) for ask in asks]
    serving.run()
    return [serving.outcomes[rid] for rid in rids]


def serve_alone(engine: Engine, asks: Sequence[Ask]) -> list[Outcome]:
    """Outcomes of requests run one after the other."""
    return [serve_all(engine, [ask])[0] for ask in asks]


def floats(column: bytes) -> list[float]:
    return list(unpack(F32, column))


def tiny_folder(parent: Path, name: str) -> Path:
    """A checkpoint folder of the tiny random model `name`."""
    folder = parent / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    save_file(lively_weights(spec_of(CONFIGS[name])), folder / "model.safetensors")
    return folder


def tiny_engine(folder: Path, **options: object) -> Engine:
    """Poisoned unless asked otherwise, so that every test on it shows a stale page that is read."""
    defaults: dict[str, object] = {
        "poison": True,
        "slots": 6,
        "page_tokens": 4,
        "prompt_chunk_tokens": 16,
        "start_state": "noise",
    }
    return Engine.load(EngineConfig(model=str(folder), **(defaults | options)))  # type: ignore[arg-type]
