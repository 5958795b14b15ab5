"""POST /cache/reset: an operator empties the prefix cache. Behind the same key as everything else."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from epicycle.actors.gateway.core import Core
from epicycle.actors.gateway.errors import ApiError
from epicycle.transport.wire.request import ResetCache

ANSWER_S = 10.0  # control turns in milliseconds; a hung one is named by /health


def add_routes(router: web.UrlDispatcher, core: Core) -> None:
    async def reset(_request: web.Request) -> web.Response:
        freed_pages = await _reset(core)
        return web.Response(body=msgspec.json.encode({"freed_pages": freed_pages}), content_type="application/json")

    router.add_post("/cache/reset", reset)


async def _reset(core: Core) -> int:
    """Pages freed. Raises ApiError."""
    core.admit()
    ref, future = core.table.cache_resets.new()
    try:
        await core.links.submit(ResetCache(ref, core.number))
        async with asyncio.timeout(ANSWER_S):
            return await future
    except TimeoutError:
        raise ApiError("timeout", f"control has not answered a cache reset within {ANSWER_S:.0f} s") from None
    finally:
        core.table.cache_resets.forget(ref)
