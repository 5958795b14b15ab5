"""What the configuration and a model's facts mean for the prefix cache: keys of a request, hits it may use, limits.

Pure functions of one executor's facts. It must not know which pages are cached (leases) or who waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from epicycle.kvstore.prefix_keys import chain_keys, chain_root
from epicycle.transport.config import Config
from epicycle.transport.wire.control import Capabilities
from epicycle.transport.wire.request import Submit


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPolicy:
    """`identity` is everything but noise and salt that decides the bits of a prompt's KV.

    `spares_last_page`: computing a token again would change its page, in passing where loops share planes, for good
    with numerics that follow the batch. Then a page that others may read is never written again: a hit ends before the
    page of the prompt's last token.
    """

    is_on: bool
    page_tokens: int
    identity: tuple[str | int, ...]
    spares_last_page: bool
    reserve_pages: int
    pin_s: float
    pin_pages: int

    def keys(self, submit: Submit) -> tuple[bytes, ...]:
        """One key for each full page of the prompt; none where nothing is cached."""
        if not self.is_on:
            return ()
        root = chain_root(*self.identity, submit.noise_seed, submit.cache_salt)
        return chain_keys(root, submit.prompt, self.page_tokens)

    def most_hits(self, submit: Submit) -> int:
        """Pages that the request may find: none where every prompt token's logprobs are asked for."""
        if not self.may_hit(submit.sampling.prompt_logprobs):
            return 0
        tokens = len(submit.prompt) // 4
        return (tokens - self.spares_last_page) // self.page_tokens

    def may_hit(self, prompt_logprobs: int) -> bool:
        return self.is_on and prompt_logprobs < 0

    def may_keep_head(self, submit: Submit) -> bool:
        """Its prompt is whole pages and its first token is wanted: a repeat may start at the LM head."""
        is_whole = len(submit.prompt) // 4 % self.page_tokens == 0
        return is_whole and submit.sampling.max_tokens > 0 and self.may_hit(submit.sampling.prompt_logprobs)

    def session(self, submit: Submit) -> tuple[str, str] | None:
        """Whose pin the request's prompt becomes when it ends; salted, so that tenants don't meet."""
        if not submit.session_id or not self.is_on or self.pin_s == 0:
            return None
        return (submit.cache_salt, submit.session_id)


def prefix_policy(config: Config, facts: Capabilities) -> PrefixPolicy:
    scheduler, engine = config.scheduler, config.engine
    return PrefixPolicy(
        is_on=scheduler.prefix_cache,
        page_tokens=facts.page_tokens,
        identity=(
            facts.fingerprint,
            facts.model_type,
            facts.kv_layout,
            facts.planes,
            facts.loops,
            facts.dtype,
            facts.device.partition(":")[0],  # executors on devices of one kind have the same bits
            engine.numerics,
            engine.start_state,
        ),
        spares_last_page=facts.planes < facts.loops or engine.numerics != "invariant",
        reserve_pages=scheduler.prefix_reserve_bytes // facts.page_bytes,
        pin_s=scheduler.session_pin_s,
        pin_pages=scheduler.session_pin_pages or facts.total_pages // 4,
    )
