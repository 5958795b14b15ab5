"""Gateway <-> control: a request enters, is accepted or refused, or is cancelled; an operator empties the prefix cache.

One Submit is one sequence (one choice of one prompt): n > 1 or a list of prompts are several Submits that share
`group`. The gateway makes the rid and its table entry before it sends; client ids never travel.
"""

from __future__ import annotations

from epicycle.transport.wire.base import Wire


class Sampling(Wire, frozen=True):
    """How the next token is chosen. Ranges are checked in the gateway; the executor trusts them.

    `seed` is any 64-bit value (the gateway draws fresh entropy when the client gave none); the generator is keyed by
    (seed, choice, position). `logprobs` is the number of alternatives beside the chosen token, -1 for none at all;
    `prompt_logprobs` the same for the prompt's own tokens. `stop_ids` holds every id that ends the sequence, EOS ids
    included unless ignore_eos; they stay in the output. `max_tokens` 0 scores the prompt only.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    choice: int = 0
    min_tokens: int = 0
    logprobs: int = -1
    prompt_logprobs: int = -1
    stop_ids: bytes = b""  # I32
    logit_bias_ids: bytes = b""  # I32
    logit_bias_values: bytes = b""  # F32, as long as the ids


class LoopBounds(Wire, frozen=True):
    """The loop controls of one request: they bound generated tokens only, prompts always run full depth.

    `exit_trace` (U16) prescribes the depth of every output under the `trace` rule: entry 0 is the model's full depth,
    one entry for each output up to max_tokens. `max_loops` 0 means the model's depth.
    """

    min_loops: int = 1
    max_loops: int = 0
    exit_threshold: float = 1.0
    exit_trace: bytes = b""


class Submit(Wire, frozen=True, tag=1):
    """One sequence to run. `prompt` is I32 ids, at least one. `deadline_ms` counts from receipt, 0 = none.

    `priority`: lower runs first. `gateway` is the number of the gateway that owns the rid. `cache_salt` is part of the
    prefix key; `session_id` pins the prompt's pages for a while after the end, under that salt.
    """

    rid: int
    gateway: int
    prompt: bytes
    sampling: Sampling
    loops: LoopBounds
    priority: int = 0
    deadline_ms: int = 0
    group: int = 0  # rid of the first choice; 0 = alone
    noise_seed: int = 0
    cache_salt: str = ""
    session_id: str = ""


class Cancel(Wire, frozen=True, tag=2):
    """Stop `rid` and free what it holds; idempotent, unknown rids are ignored. `cause`: client, stop, shutdown."""

    rid: int
    cause: str = "client"


class Accepted(Wire, frozen=True, tag=3):
    """`rid` passed admission and has a slot. A TokenBatch implies it; headers may go out in a long prefill.

    `executor_epoch` is of the executor whose tokens will come, and with which the request ends.
    """

    rid: int
    queue_ms: float = 0.0
    executor_epoch: int = 0


class Rejected(Wire, frozen=True, tag=4):
    """Terminal: `rid` will never run. `code` as in the HTTP error body; `retry_after_s` > 0 where waiting helps."""

    rid: int
    code: str
    message: str
    param: str = ""
    retry_after_s: int = 0


class ResetCache(Wire, frozen=True, tag=5):
    """Forget every prefix, pins too. `ref` is the gateway's own number and comes back in CacheReset."""

    ref: int
    gateway: int


class CacheReset(Wire, frozen=True, tag=6):
    """The prefix cache is empty; `freed_pages` were held by nobody else."""

    ref: int
    freed_pages: int


class Admitting(Wire, frozen=True, tag=7):
    """Control's word on what it knows: a Submit sent from now on finds one of these executors (I32 epochs) there, as
    long as they live. Said to a gateway when it comes up and whenever that changes; the last one counts.
    """

    control_epoch: int
    executor_epochs: bytes = b""


FromSubmitLink = Submit | ResetCache
ToControl = FromSubmitLink | Cancel
Verdict = Accepted | Rejected | CacheReset | Admitting
