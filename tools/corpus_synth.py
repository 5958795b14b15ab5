"""The two synthetic sources: stories on their own, and ChatML conversations of one to four exchanges.

Owns how exchanges are strung together and how much text is made. The same (kind, seed) always gives the same text.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from random import Random

from epicycle.tools.corpus_clean import exchange, turn
from epicycle.tools.corpus_sources import Country, Meaning
from epicycle.tools.corpus_stories import tell
from epicycle.tools.corpus_tasks import TASKS

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are a friendly teller of short stories.",
    "Answer in simple English.",
)
PIECE_CHARS = 2_000_000  # text made from one seed, so that pieces can be made side by side
MAX_CONVERSATION_CHARS = 2200
SYSTEM_SHARE, FACT_SHARE, LOWER_CASE_SHARE, NO_MARK_SHARE = 0.35, 0.22, 0.06, 0.05
EXCHANGES = (1, 1, 1, 2, 2, 3, 4)


def make_story(dice: Random) -> str:
    return tell(dice).text


def make_conversation(dice: Random, meanings: Sequence[Meaning], countries: Sequence[Country]) -> str:
    """One conversation; some exchanges ask for word meanings or countries of the packaged sources."""
    said = [turn("system", dice.choice(SYSTEM_PROMPTS))] if dice.random() < SYSTEM_SHARE else []
    for _ in range(dice.choice(EXCHANGES)):
        if (meanings or countries) and dice.random() < FACT_SHARE:
            question, answer = _ask_fact(dice, meanings, countries)
        else:
            question, answer = dice.choices(list(TASKS), list(TASKS.values()))[0](dice)
        said.append(exchange(_typed(dice, question), answer))
        if sum(map(len, said)) > MAX_CONVERSATION_CHARS:
            break
    return "".join(said)


def _ask_fact(dice: Random, meanings: Sequence[Meaning], countries: Sequence[Country]) -> tuple[str, str]:
    if meanings and (not countries or dice.random() < 0.5):
        # Common words come first in the list and are asked more often.
        one = meanings[int(len(meanings) * dice.random() ** 2)]
        return dice.choice((f"What does {one.word} mean?", f"Define {one.word}.")), one.answer()
    country = dice.choice(countries)
    facts = (
        (f"What is the capital of {country.name}?", f"The capital of {country.name} is {country.capital}."),
        (f"Where is {country.name}?", f"{country.name} is located in {country.location}."),
        (f"Which languages are spoken in {country.name}?", f"In {country.name}, people speak {country.languages}."),
    )
    known = [
        fact for fact, value in zip(facts, (country.capital, country.location, country.languages), strict=True) if value
    ]
    return dice.choice(known) if known else (f"Is {country.name} a country?", f"Yes, {country.name} is a country.")


def _typed(dice: Random, question: str) -> str:
    """The question as people type it: now and then in lower case or without its last mark."""
    if dice.random() < LOWER_CASE_SHARE:
        question = question[0].lower() + question[1:]
    return question[:-1] if question[-1] in ".?!" and dice.random() < NO_MARK_SHARE else question


def make_piece(
    kind: str, chars: int, meanings: Sequence[Meaning], countries: Sequence[Country], seed: int
) -> list[str]:
    """About `chars` characters of documents of one kind from one seed."""
    dice = Random(f"{kind}-{seed}")
    documents: list[str] = []
    while chars > 0:
        document = make_story(dice) if kind == "story" else make_conversation(dice, meanings, countries)
        documents.append(document)
        chars -= len(document)
    return documents


def make_documents(
    kind: str, megabytes: float, seed: int, meanings: Sequence[Meaning] = (), countries: Sequence[Country] = ()
) -> list[str]:
    """Documents of one synthetic source ("story" or "chat"), made by as many processes as there are cores."""
    chars = int(megabytes * 1e6)
    pieces = max(1, round(chars / PIECE_CHARS))
    make = partial(make_piece, kind, chars // pieces, meanings, countries)
    seeds = [seed * 1_000_003 + piece for piece in range(pieces)]
    if pieces == 1:
        return make(seeds[0])
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return [document for piece in pool.map(make, seeds) for document in piece]
