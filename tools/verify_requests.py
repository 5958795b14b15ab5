"""The requests that `verify` tries: lengths at every edge, half of them sampled, a third leaving early.

Owns the mix and its seeds. Must not know conditions or engines; needs only their sizes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from epicycle.tools.offline import Request
from epicycle.transport.wire.columns import F32, I32, U16, pack
from epicycle.transport.wire.request import LoopBounds, Sampling

COMPANY_OUTPUTS = (4, 24)  # short lives: rows come and go beside the trials
COMPANY_PROMPT = 512  # at most: what takes its turns beside a trial, not what the trial's time goes to


@dataclass(frozen=True, kw_only=True)
class MixFacts:
    """What requests are cut to. `edges` are lengths around which prompts lie: pages and chunks."""

    vocab_size: int
    loops: int
    longest_prompt: int
    outputs: int
    edges: tuple[int, ...]
    is_traced: bool  # early leavers follow listed depths; else the exit rule's threshold


def prompt_lengths(facts: MixFacts) -> list[int]:
    """The lengths every large enough set has: the shortest, the longest, and one below, at and above each edge."""
    near = {edge + step for edge in facts.edges for step in (-1, 0, 1)} | {1, 2, facts.longest_prompt}
    return sorted(length for length in near if 1 <= length <= facts.longest_prompt)


def make_trials(facts: MixFacts, count: int, seed: int) -> list[Request]:
    """`count` requests of `facts.outputs` tokens; edges first, in an order of the seed's, then any length."""
    rng = random.Random(seed)
    lengths = prompt_lengths(facts)
    rng.shuffle(lengths)
    lengths += [rng.randint(1, facts.longest_prompt) for _ in range(count - len(lengths))]
    return [_request(facts, rng, number, lengths[number], facts.outputs) for number in range(count)]


def make_company(facts: MixFacts, seed: int, *, is_long: bool = False) -> Iterator[Request]:
    """Requests without end, for the rows beside the trials. Long ones have prompts as the trials do: pieces of many
    prompts, of any length and anywhere in theirs, then share ticks."""
    rng = random.Random(f"company {seed}")
    number = 0
    longest = facts.longest_prompt if is_long else min(COMPANY_PROMPT, facts.longest_prompt // 2)
    while True:
        length = rng.randint(1, max(1, longest))
        yield _request(facts, rng, number, length, min(facts.outputs, rng.randint(*COMPANY_OUTPUTS)))
        number += 1


def describe(request: Request) -> str:
    """What kind of request this is, in a few words."""
    sampling, loops = request.sampling, request.loops
    way = "greedy" if sampling.temperature == 0 else "sampled"
    leaves = ", early exit" if loops.exit_trace or loops.exit_threshold < 1 else ""
    return f"{len(request.prompt)} prompt tokens, {way}{leaves}"


def _request(facts: MixFacts, rng: random.Random, number: int, length: int, outputs: int) -> Request:
    return Request(
        prompt=[rng.randrange(facts.vocab_size) for _ in range(length)],
        sampling=_sampled(facts, rng, outputs) if number % 2 else Sampling(outputs, temperature=0.0, logprobs=0),
        loops=_early(facts, rng, outputs) if number % 3 == 2 else _full(facts, outputs),
        noise_seed=rng.randrange(3),
    )


def _sampled(facts: MixFacts, rng: random.Random, outputs: int) -> Sampling:
    """Every part of the sampler, each in some of the requests."""
    biased = rng.sample(range(facts.vocab_size), k=rng.choice((0, 0, 3)))
    return Sampling(
        outputs,
        temperature=rng.choice((0.7, 1.0, 1.4)),
        top_k=rng.choice((0, 0, 20)),
        top_p=rng.choice((1.0, 0.9)),
        min_p=rng.choice((0.0, 0.02)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
        presence_penalty=rng.choice((0.0, 0.5)),
        frequency_penalty=rng.choice((0.0, 0.3)),
        seed=rng.getrandbits(63),
        logprobs=0,
        logit_bias_ids=pack(I32, biased),
        logit_bias_values=pack(F32, [rng.uniform(-4, 4) for _ in biased]),
    )


def _early(facts: MixFacts, rng: random.Random, outputs: int) -> LoopBounds:
    if facts.is_traced:
        return _listed([rng.randint(1, facts.loops) for _ in range(outputs)], facts.loops)
    return LoopBounds(min_loops=rng.randint(1, 2), exit_threshold=rng.choice((0.3, 0.5, 0.7, 0.9)))


def _full(facts: MixFacts, outputs: int) -> LoopBounds:
    return _listed([facts.loops] * outputs, facts.loops) if facts.is_traced else LoopBounds()


def _listed(depths: list[int], loops: int) -> LoopBounds:
    return LoopBounds(exit_trace=pack(U16, [loops, *depths[1:]]))
