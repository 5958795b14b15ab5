"""Reading request bodies: content type, size, deadline. Raises ApiError only."""

from __future__ import annotations

import asyncio

from aiohttp import web

from epicycle.actors.gateway.errors import ApiError, invalid
from epicycle.transport.config import ServerConfig


async def read_json_body(request: web.Request, server: ServerConfig) -> bytes:
    """The bytes of a JSON body. 415, 413, 408, or 400 when they can't be had."""
    if request.content_type != "application/json":
        text = f"content type is {request.content_type!r}, must be application/json"
        raise ApiError("unsupported_media_type", text)
    try:
        async with asyncio.timeout(server.body_timeout_s):
            return await request.read()
    except TimeoutError:
        text = f"the body did not arrive within {server.body_timeout_s:g} s (server.body_timeout_s)"
        raise ApiError("request_timeout", text) from None
    except web.HTTPRequestEntityTooLarge:
        text = f"the body is larger than {server.max_body_bytes} bytes (server.max_body_bytes)"
        raise ApiError("request_too_large", text) from None
    except (web.RequestPayloadError, ValueError) as error:
        raise invalid(None, f"the body can't be read: {error}") from None
