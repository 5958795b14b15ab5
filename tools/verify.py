"""`epicycle verify`: does a request's output depend on its company? It must not, in a single bit.

A trial is one request under one condition. Its tokens, exit depths and float32 logprobs are compared with those of the
same request run alone. Prints how many differ, and where the first one does; exit code 1 when any does. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from epicycle.engine.engine import Engine
from epicycle.engine.errors import EngineError
from epicycle.engine.exits import registry as exits
from epicycle.engine.hardware import device_name
from epicycle.engine.kv_copy import first_different
from epicycle.engine.models.config import read_spec
from epicycle.engine.models.locate import locate
from epicycle.engine.setup import resolve_device
from epicycle.kvstore.errors import KvError
from epicycle.tools import bench_facts
from epicycle.tools.engine_options import parse_options, read_options
from epicycle.tools.offline import Request
from epicycle.tools.progress import progress
from epicycle.tools.verify_compare import Difference, Outcome, first_difference
from epicycle.tools.verify_conditions import CONDITIONS, Condition, share, skip_reason
from epicycle.tools.verify_requests import MixFacts, describe, make_company, make_trials
from epicycle.tools.verify_run import EngineKeeper, Load, Party, kv_alone, run_alone
from epicycle.transport.config import EngineConfig

PROMPT_CHUNKS = 2.5  # default longest prompt, in chunks
CHUNK_EDGES = (64, 256, 2048)
TOLD = 20  # differing trials named one by one


@dataclass
class Verdict:
    """What came of all trials. `differing` holds (condition, request number, where)."""

    trials: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    differing: list[tuple[str, int, Difference]] = field(default_factory=list)
    first_tensor: str = ""
    preemptions: dict[str, int] = field(default_factory=dict)  # where there were any

    def differ(self, name: str) -> int:
        return sum(condition == name for condition, _, _ in self.differing)


def load_telling(options: EngineConfig) -> Engine:
    return Engine.load(options, progress())


def main(argv: list[str], load: Load = load_telling) -> int:
    arguments = parser().parse_args(argv)
    try:
        options = base_options(arguments)
        verdict = Verifier(options, load, arguments).run()
    except (EngineError, KvError, RuntimeError) as error:
        print(f"epicycle verify: {error}", file=sys.stderr)
        return 1
    total = sum(verdict.trials.values())
    print(f"\n{len(verdict.differing)} of {total} trials differ from their solo run")
    print(json.dumps(as_json(verdict, options, arguments)))
    return 1 if verdict.differing else 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="epicycle verify", description=__doc__)
    made.add_argument("--trials", type=int, default=60, help="trials over all conditions")
    made.add_argument("--model", default="embedded:ouro", help="embedded model, shipped config, or folder")
    made.add_argument("--weights", choices=("auto", "random"), default="auto")
    made.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    made.add_argument("--device", default="auto", help="auto, cpu, or cuda:N")
    made.add_argument("--seed", type=int, default=0, help="key of requests and schedules")
    made.add_argument("--outputs", type=int, default=64, help="output tokens of each trial")
    made.add_argument("--longest-prompt", type=int, default=0, metavar="TOKENS", help="0: two chunks and a half")
    made.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS), metavar="NAME")
    made.add_argument("--most-seconds", type=float, default=0.0, help="begin no condition after so long; 0: no limit")
    made.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="any other engine option")
    return made


def base_options(arguments: argparse.Namespace) -> EngineConfig:
    """The plain engine's options: as many slots as the widest condition, room for the longest request."""
    device = resolve_device(arguments.device).type
    spec = read_spec(locate(arguments.model, "random").folder)
    given = parse_options(arguments.set)
    chunk = given.get("prompt_chunk_tokens") or {"cpu": 64, "cuda": 256}.get(device, 256)
    longest = arguments.longest_prompt or int(PROMPT_CHUNKS * chunk)
    longest = min(longest, spec.context_tokens - arguments.outputs)
    if longest < 1 or arguments.outputs < 1 or arguments.trials < 1:
        raise RuntimeError("--trials, --outputs and the longest prompt must be at least 1 and fit the model's context")
    own_rule = exits.DEFAULT_RULES.get(spec.model_type, "fixed")
    is_traced = arguments.weights == "random" or not exits.RULES[own_rule].adaptive
    defaults: dict[str, Any] = {
        "model": arguments.model,
        "weights": arguments.weights,
        "dtype": arguments.dtype,
        "device": arguments.device,
        "slots": max(CONDITIONS[name].width for name in arguments.conditions),
        "context_tokens": longest + arguments.outputs,
        "prompt_chunk_tokens": chunk,
        "exit_rule": "trace" if is_traced else "",
    }
    return read_options(defaults | given)


class Verifier:
    """Solo runs first, then every condition; engines are loaded one after the other, never two."""

    def __init__(self, options: EngineConfig, load: Load, arguments: argparse.Namespace) -> None:
        self._options = options
        self._keeper = EngineKeeper(load)
        self._arguments = arguments
        self._device = resolve_device(options.device).type
        self._verdict = Verdict()

    def run(self) -> Verdict:
        arguments, names = self._arguments, self._runnable()
        if not names:
            raise RuntimeError("every condition asked for is skipped")
        counts = share(arguments.trials, len(names))
        engine = self._keeper.get(self._options)
        self._facts = mix_facts(engine, self._options, arguments.outputs)
        trials = make_trials(self._facts, max(counts), arguments.seed)
        started_s = time.monotonic()
        solo = [run_alone(engine, request) for request in trials]
        del engine  # the keeper's alone, so that it can go before the next one is loaded
        print(f"{'alone':16} {len(trials):4} requests  {time.monotonic() - started_s:6.1f} s", flush=True)
        for name, count in zip(names, counts, strict=True):
            if arguments.most_seconds and time.monotonic() - started_s > arguments.most_seconds:
                self._skip(name, f"{arguments.most_seconds:.0f} s are over")
            else:
                self._try(name, trials[:count], solo)
        if self._verdict.differing:
            self._verdict.first_tensor = self._find_tensor(trials)
            print(f"the first differing tensor: {self._verdict.first_tensor}", flush=True)
        return self._verdict

    def _skip(self, name: str, reason: str) -> None:
        self._verdict.skipped[name] = reason
        print(f"{name:16} skipped: {reason}", flush=True)

    def _runnable(self) -> list[str]:
        """Conditions to try, those on the plain engine first; says why others are skipped."""
        for name in self._arguments.conditions:
            reason = skip_reason(CONDITIONS[name], self._device)
            if reason:
                self._skip(name, reason)
        names = [name for name in self._arguments.conditions if name not in self._verdict.skipped]
        return sorted(names, key=lambda name: (CONDITIONS[name].is_split, bool(CONDITIONS[name].options)))

    def _try(self, name: str, trials: Sequence[Request], solo: Sequence[Outcome]) -> None:
        condition, started_s = CONDITIONS[name], time.monotonic()
        party = self._party(condition)
        outcomes = party.run(trials)
        self._verdict.trials[name] = len(trials)
        for number, outcome in enumerate(outcomes):
            difference = first_difference(solo[number], outcome)
            if difference is not None:
                self._tell(name, number, trials[number], difference)
        spent_s = time.monotonic() - started_s
        counts = f"{len(trials):4} trials    {self._verdict.differ(name):4} differ"
        hits = f", {party.hit_tokens} prompt tokens cached" if condition.is_warm else ""
        if condition.is_preempted:
            self._verdict.preemptions[name] = party.preemptions
            hits += f", {party.preemptions} preemptions, {party.attached_pages} pages attached again"
        print(f"{name:16} {counts}  {spent_s:6.1f} s, up to {party.peak_rows} resident{hits}", flush=True)

    def _party(self, condition: Condition) -> Party:
        options = read_options({**asdict_options(self._options), **condition.options})
        seed = self._arguments.seed
        company = make_company(self._facts, seed, is_long=condition.is_long)
        if condition.is_split:
            prefill, decode = self._keeper.get_pair(options)
            return Party(decode, condition, company, seed, prefill)
        return Party(self._keeper.get(options), condition, company, seed)

    def _find_tensor(self, trials: Sequence[Request]) -> str:
        """Run the first trial that differed alone and in its condition once more, and compare what they leave in KV."""
        name, number, _ = self._verdict.differing[0]
        alone = kv_alone(self._keeper.get(self._options), trials[number])
        party = self._party(CONDITIONS[name])
        watch = party.watch(number)
        party.run(trials[: self._verdict.trials[name]])
        if alone is None or watch.kv is None:
            return "unknown: its KV was gone at its end"
        place = first_different(alone, watch.kv)
        return (
            "none in KV: it differs behind it, in coda, head or sampler, or not again" if place is None else str(place)
        )

    def _tell(self, name: str, number: int, request: Request, difference: Difference) -> None:
        self._verdict.differing.append((name, number, difference))
        if len(self._verdict.differing) <= TOLD:
            print(f"{name:16} request {number} ({describe(request)}) differs: {difference}")


def asdict_options(options: EngineConfig) -> dict[str, Any]:
    return {name: getattr(options, name) for name in EngineConfig.__struct_fields__}


def mix_facts(engine: Engine, options: EngineConfig, outputs: int) -> MixFacts:
    return MixFacts(
        vocab_size=engine.spec.vocab_size,
        loops=engine.spec.loops,
        longest_prompt=options.context_tokens - outputs,
        outputs=outputs,
        edges=(engine.pool.page_tokens, engine.chunk_tokens, *CHUNK_EDGES),
        is_traced=exits.RULES[engine.rule_name].needs_trace,
    )


def as_json(verdict: Verdict, options: EngineConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    device = resolve_device(options.device)
    told = [
        {"condition": name, "request": number, **asdict(difference)}
        for name, number, difference in islice(verdict.differing, TOLD)
    ]
    return {
        "verify": "solo against company",
        "model": options.model,
        "options": asdict_options(options),
        "seed": arguments.seed,
        "trials": sum(verdict.trials.values()),
        "differ": len(verdict.differing),
        "conditions": {
            name: {"trials": count, "differ": verdict.differ(name)} for name, count in verdict.trials.items()
        },
        "preemptions": verdict.preemptions,
        "skipped": verdict.skipped,
        "differing": told,
        "first_tensor": verdict.first_tensor,
        "commit": bench_facts.commit(),
        "device": device_name(str(device)),
        "versions": bench_facts.versions(),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
