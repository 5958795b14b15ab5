"""Errors of the kvstore package: one base with a stable code, one subclass per kind of refusal.

Owns the codes. A text names the value, its limit and the knob that moves the limit. Must not know who shows it to whom.
"""

from __future__ import annotations

from typing import ClassVar


class KvError(Exception):
    """Base of everything kvstore raises; `code` is stable and safe to show to clients."""

    code: ClassVar[str] = "kv_error"


class GeometryRefused(KvError):
    """A model shape or page size that no layout can hold."""

    code = "kv_geometry_refused"


class LayoutRefused(KvError):
    """A layout name, plane budget or page size that is unknown or makes no sense for this geometry."""

    code = "kv_layout_refused"


class PagesImpossible(KvError):
    """A page count or page number that this pool can never serve."""

    code = "kv_pages_impossible"


class PoolShort(KvError):
    """Not enough free pages right now; nothing was taken. The caller may free some and ask again."""

    code = "kv_pool_short"


class OwnerConflict(KvError):
    """A claim for an owner that already has pages, or growth of one that has none."""

    code = "kv_owner_conflict"


class PlanRefused(KvError):
    """The bytes left for KV do not fund what was asked for."""

    code = "kv_plan_refused"


class ReserveRefused(KvError):
    """A reservation rule with a step, mark or page size that could never work."""

    code = "kv_reserve_refused"


class RequestTooLong(KvError):
    """A request whose lifetime needs more pages than the whole pool has, or whose lengths are not positive."""

    code = "context_length_exceeded"
