"""How many pages a request needs: for its whole life, at admission, and when it grows.

Owns the arithmetic of reservation. Must not know which pages are free (ledger) or who waits for them (scheduler).
"""

from __future__ import annotations

import msgspec

from epicycle.kvstore.errors import RequestTooLong, ReserveRefused


def pages_for(tokens: int, page_tokens: int) -> int:
    """ceil(tokens / page_tokens)."""
    return -(-tokens // page_tokens)


def capacity_tokens(prompt_tokens: int, max_tokens: int) -> int:
    """Positions that a request ever writes: prompt + max_tokens - 1, as the last sample is never fed back."""
    if prompt_tokens < 1 or max_tokens < 1:
        raise RequestTooLong(
            f"a prompt of {prompt_tokens} tokens with max_tokens {max_tokens}: both must be at least 1"
        )
    return prompt_tokens + max_tokens - 1


def lifetime_pages(prompt_tokens: int, max_tokens: int, page_tokens: int) -> int:
    """Pages that a request holds if it runs to max_tokens."""
    return pages_for(capacity_tokens(prompt_tokens, max_tokens), page_tokens)


def fits_ever(prompt_tokens: int, max_tokens: int, page_tokens: int, total_pages: int) -> bool:
    """False when the request can't run even alone in the pool; waiting would be for ever."""
    return lifetime_pages(prompt_tokens, max_tokens, page_tokens) <= total_pages


def require_fits_ever(prompt_tokens: int, max_tokens: int, page_tokens: int, total_pages: int) -> None:
    """Raise RequestTooLong unless `fits_ever`."""
    if not fits_ever(prompt_tokens, max_tokens, page_tokens, total_pages):
        raise RequestTooLong(
            f"a prompt of {prompt_tokens} tokens with max_tokens {max_tokens} needs "
            f"{lifetime_pages(prompt_tokens, max_tokens, page_tokens)} pages of {page_tokens} tokens; the pool has "
            f"{total_pages}: lower max_tokens, shorten the prompt, or serve with more KV memory"
        )


class ReserveRule(msgspec.Struct, frozen=True, kw_only=True):
    """When pages are taken. Without `grow_tokens` a request reserves its whole life at admission and never grows.

    With it, a request starts with its prompt and `grow_tokens` more, and asks again as soon as fewer than
    `low_water_tokens` positions are left unwritten. The low-water mark covers the tokens made while the answer is on
    its way, so a row that the pool can serve never waits.
    """

    page_tokens: int
    grow_tokens: int | None = None
    low_water_tokens: int = 1

    def __post_init__(self) -> None:
        if self.page_tokens < 1:
            raise ReserveRefused(f"page_tokens is {self.page_tokens}; it must be at least 1")
        if self.grow_tokens is not None and self.grow_tokens < 1:
            raise ReserveRefused(f"grow_tokens is {self.grow_tokens}; it must be at least 1")
        if self.low_water_tokens < 1:
            raise ReserveRefused(f"low_water_tokens is {self.low_water_tokens}; it must be at least 1")

    def first_pages(self, prompt_tokens: int, max_tokens: int) -> int:
        """Pages to claim at admission."""
        return self._pages_up_to(prompt_tokens, prompt_tokens, max_tokens)

    def pages_to_go_on(self, written_tokens: int, prompt_tokens: int, max_tokens: int) -> int:
        """Pages to claim for a request that has written so much already, its prompt or more."""
        return self._pages_up_to(max(written_tokens, prompt_tokens), prompt_tokens, max_tokens)

    def is_low(self, written_tokens: int, held_pages: int, prompt_tokens: int, max_tokens: int) -> bool:
        """True when the row should get more pages now: below the low-water mark and not yet at its full size."""
        if held_pages >= lifetime_pages(prompt_tokens, max_tokens, self.page_tokens):
            return False
        return held_pages * self.page_tokens - written_tokens < self.low_water_tokens

    def growth_pages(self, written_tokens: int, held_pages: int, prompt_tokens: int, max_tokens: int) -> int:
        """Pages to add now; 0 while the row is not low."""
        if not self.is_low(written_tokens, held_pages, prompt_tokens, max_tokens):
            return 0
        return max(0, self._pages_up_to(written_tokens, prompt_tokens, max_tokens) - held_pages)

    def _pages_up_to(self, written_tokens: int, prompt_tokens: int, max_tokens: int) -> int:
        """Pages for the written positions, the low-water mark and one growth step, cut at the lifetime."""
        whole = capacity_tokens(prompt_tokens, max_tokens)
        if self.grow_tokens is None:
            return pages_for(whole, self.page_tokens)
        return pages_for(min(whole, written_tokens + self.low_water_tokens + self.grow_tokens), self.page_tokens)
