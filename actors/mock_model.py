"""The model of the mock executor: what it says to a prompt, how deep each token goes, what it claims to be.

Pure functions of the request, so that a test can predict every token, depth and logprob. Owns no state.
"""

from __future__ import annotations

import json
from typing import Any

from epicycle.actors.model_folder import model_folder
from epicycle.transport.config import Config
from epicycle.transport.wire.columns import I32, U16, pack, unpack
from epicycle.transport.wire.control import Capabilities
from epicycle.transport.wire.request import LoopBounds

FIRST_LETTER_ID = 67  # "a" in the embedded tokenizer; the 26 letters follow one another
LETTERS = 26
KEPT_HEADS = 8
MOST_SPILLS = 3
DEFAULT_EXIT_RULES = {"ouro": "ouro", "huginn_raven": "latent_diff", "nanbeige": "fixed"}


def mock_key(prompt: memoryview) -> int:
    """What the mock remembers of a prompt: prompts that differ in one id give different texts, mostly."""
    key = len(prompt)
    for token in prompt:
        key = (key * 31 + token) % 1_000_003
    return key


def mock_token(key: int, index: int, vocab_size: int = 4096) -> int:
    """Output `index` (0-based) of a prompt with `mock_key` `key`: a lower-case letter of the embedded tokenizer."""
    return (FIRST_LETTER_ID + (key + index * 7 + index * index) % LETTERS) % vocab_size


def mock_logprob(token: int) -> float:
    """Exact in float32, so that a test may compare with ==."""
    return -(1 + token % 16) / 8


def mock_depth(key: int, index: int, bounds: LoopBounds, loops: int) -> int:
    """Loops run for output `index`: the first runs all; later ones vary within the bounds unless the threshold is 1."""
    if bounds.exit_trace:
        return int(unpack(U16, bounds.exit_trace)[index])
    most = min(bounds.max_loops or loops, loops)
    if index == 0:
        return loops
    if bounds.exit_threshold >= 1.0:
        return most
    least = min(bounds.min_loops, most)
    return least + (key + index) % (most - least + 1)


def mock_capabilities(config: Config) -> Capabilities:
    """What the mock serves, from the model folder's config.json and the configuration. Raises ConfigError."""
    folder = model_folder(config.engine.model)
    facts: dict[str, Any] = json.loads((folder / "config.json").read_text())
    engine = config.engine
    model_type = str(facts["model_type"])
    loops = engine.loops or _first(facts, "total_ut_steps", "num_loops", "mean_recurrence")
    model_context_tokens = _first(facts, "max_position_embeddings", "block_size")
    pool_tokens = config.executor.mock_pages * engine.page_tokens
    layers = _first(facts, "num_hidden_layers", "n_layers")
    width = _first(facts, "hidden_size", "n_embd")
    bytes_per_token = 2 * 2 * layers * loops * width
    return Capabilities(
        model_id=config.server.served_model_name or folder.name,
        model_type=model_type,
        vocab_size=_first(facts, "vocab_size"),
        context_tokens=min(engine.context_tokens or model_context_tokens, model_context_tokens, pool_tokens),
        model_context_tokens=model_context_tokens,
        loops=loops,
        eos_ids=pack(I32, _ids(facts.get("eos_token_id"))),
        exit_rule=engine.exit_rule or DEFAULT_EXIT_RULES.get(model_type, "fixed"),
        can_exit_early=model_type != "nanbeige",
        slots=engine.slots,
        total_pages=config.executor.mock_pages,
        page_tokens=engine.page_tokens,
        page_bytes=bytes_per_token * engine.page_tokens,
        bytes_per_token=bytes_per_token,
        kv_layout=engine.kv_layout,
        planes=loops,
        dtype="mock",
        device="mock",
        prompt_chunk_tokens=engine.prompt_chunk_tokens or 128,
        run_ahead_ticks=1,
        host_pages=config.executor.mock_host_pages,
        host_prefix_pages=config.executor.mock_host_prefix_pages,
        most_spills=MOST_SPILLS,
        kept_heads=KEPT_HEADS,
        plan_terms={"total_pages": config.executor.mock_pages, "slots": engine.slots},
        plan_line=f"kv pool: mock, {config.executor.mock_pages} pages of {engine.page_tokens} tokens",
    )


def _first(facts: dict[str, Any], *names: str) -> int:
    """The first of these keys that config.json has: model families name one fact differently."""
    return int(next(facts[name] for name in names if facts.get(name) is not None))


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
