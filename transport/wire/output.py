"""Executor -> gateway: the tokens of a step, and how each request ended.

One TokenBatch a step and gateway carries all rows. Late or repeated tokens drop by index: a row states the index of
its first token. Rows of one rid arrive in order; its Fin comes after its last token.
"""

from __future__ import annotations

from epicycle.transport.wire.base import Wire


class TokenBatch(Wire, frozen=True, tag=20):
    """Row columns: rids U64, first_index I32 (0-based output index), counts I32, logprob_k I32 (-1: no logprobs).

    Token columns, rows concatenated: tokens I32, exit_depths U16 (loops run for that token). For the rows with
    logprob_k >= 0 only: logprobs F32, then logprob_k alternatives a token in top_ids I32 / top_logprobs F32.
    """

    epoch: int
    rids: bytes
    first_index: bytes
    counts: bytes
    tokens: bytes
    exit_depths: bytes
    logprob_k: bytes = b""  # empty: -1 for every row
    logprobs: bytes = b""
    top_ids: bytes = b""
    top_logprobs: bytes = b""


class PromptLogprobs(Wire, frozen=True, tag=21):
    """Logprobs of prompt tokens `first` .. `first + len - 1` (F32), with `k` alternatives each. Token 0 has none, so
    `first` is at least 1. Sent chunk by chunk before the first TokenBatch row of the rid.
    """

    epoch: int
    rid: int
    first: int
    k: int
    logprobs: bytes
    top_ids: bytes = b""
    top_logprobs: bytes = b""


class PrefixHit(Wire, frozen=True, tag=23):
    """The first `tokens` tokens of the prompt of `rid` were not computed: the prefix cache had their KV.

    Sent before anything else about the rid; not at all where there was no hit.
    """

    epoch: int
    rid: int
    tokens: int


POOL_WARNING = (
    "the KV pool ran dry: output ends early; serve with more KV memory (engine.kv_memory_bytes), with more host memory "
    "to save requests in (engine.host_kv_bytes), or with fewer slots"
)


class Fin(Wire, frozen=True, tag=22):
    """Terminal: `rid` has ended at the executor after `tokens` outputs.

    `reason`: stop, length, cancelled, deadline, shutdown, error. For error, `code` and `message` are the HTTP body's.
    `warning` is for a human (the pool ran dry). Times are milliseconds.
    """

    epoch: int
    rid: int
    reason: str
    tokens: int
    code: str = ""
    message: str = ""
    warning: str = ""
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


ToGateway = TokenBatch | PromptLogprobs | PrefixHit | Fin
