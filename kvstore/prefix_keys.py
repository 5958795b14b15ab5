"""Keys of prompt pages: one digest a full page, chained, so that equal keys mean equal tokens from the first one on.

A key also stands for everything else that decides a page's bits (weights, layout, numerics, noise) and for the salt
that keeps tenants apart; all of it goes into the chain's root. SHA-256, since tenants choose the tokens. Owns the
arithmetic; must not know who keeps pages under these keys.
"""

from __future__ import annotations

import hashlib

import msgspec

TOKEN_BYTES = 4  # prompts travel as int32


def chain_root(*facts: str | int) -> bytes:
    """The digest that a chain starts from. `facts` in a fixed order; none of them runs into the next."""
    return hashlib.sha256(msgspec.json.encode(facts)).digest()


def chain_keys(root: bytes, prompt: bytes, page_tokens: int) -> tuple[bytes, ...]:
    """One key for each full page of `prompt` (I32 column); a last page that isn't full has none. O(prompt)."""
    step = TOKEN_BYTES * page_tokens
    keys: list[bytes] = []
    digest = root
    for end in range(step, len(prompt) + 1, step):
        digest = hashlib.sha256(digest + prompt[end - step : end]).digest()
        keys.append(digest)
    return tuple(keys)
