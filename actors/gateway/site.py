"""The aiohttp application: routes, origins and keys, and the rule that every error is OpenAI-shaped JSON.

Owns the order of checks before a route. Must not know what routes do.
"""

from __future__ import annotations

import hmac

import structlog
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.typedefs import Handler, Middleware

from epicycle.actors.gateway import probes, routes_cache, routes_generate, routes_models, routes_tokens
from epicycle.actors.gateway.core import Core
from epicycle.actors.gateway.errors import ApiError
from epicycle.transport.config import ServerConfig

OPEN_PATHS = ("/health", "/livez", "/readyz")  # probes carry no key
CORS_HEADERS = {
    "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
    "Access-Control-Allow-Headers": "authorization, content-type",
    "Access-Control-Max-Age": "600",
}
_CODE_OF_STATUS = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}

_log = structlog.get_logger()


def make_application(core: Core) -> web.Application:
    server = core.config.server
    app = web.Application(client_max_size=server.max_body_bytes)
    app.middlewares.append(_middleware(server))
    if server.allowed_origins:
        app.on_response_prepare.append(_allow_origin)
    for module in (routes_generate, routes_models, routes_tokens, routes_cache, probes):
        module.add_routes(app.router, core)
    return app


def error_response(error: ApiError) -> web.Response:
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s > 0 else None
    return web.Response(status=error.status, body=error.body(), content_type="application/json", headers=headers)


class JsonRunner(web.AppRunner):
    """An AppRunner whose connections answer unparsable requests in JSON as well."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.__class__ = _JsonServer  # aiohttp has no hook for the connection's class
        return server


class _JsonServer(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _JsonRequestHandler(self, loop=self._loop, **self._kwargs)


class _JsonRequestHandler(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What aiohttp found wrong with a request before any route saw it."""
        if status >= 500:
            error = _internal(request, exc)
        elif isinstance(exc, LineTooLong):
            error = ApiError("headers_too_large", "a line of the request's head is too long; the limit is 8190 bytes")
        else:
            error = ApiError("invalid_request_error", f"the request is not valid HTTP: {message or exc}".split("\n")[0])
        response = error_response(error)
        response.force_close()
        return response


def _middleware(server: ServerConfig) -> Middleware:
    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            _check_origin(request, server)
            if _is_preflight(request):
                return web.Response(status=204, headers=CORS_HEADERS)
            _check_key(request, server)
            return await handler(request)
        except ApiError as error:
            return error_response(error)
        except web.HTTPException as error:
            return _http_error(request, error)
        except ConnectionResetError:
            raise  # the client has left: nobody to answer
        except Exception as error:
            return error_response(_internal(request, error))

    return checked


def _check_origin(request: web.Request, server: ServerConfig) -> None:
    origin = request.headers.get("Origin")
    if origin is not None and origin not in server.allowed_origins:
        raise ApiError("forbidden", f"origin {origin[:200]!r} may not call this server (server.allowed_origins)")


def _is_preflight(request: web.Request) -> bool:
    return request.method == "OPTIONS" and "Origin" in request.headers


async def _allow_origin(request: web.Request, response: web.StreamResponse) -> None:
    """For every response to an origin that passed the check, streams and errors included."""
    origin = request.headers.get("Origin")
    if origin is not None and response.status != 403:
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Vary"] = "Origin"


def _check_key(request: web.Request, server: ServerConfig) -> None:
    if not server.api_key or request.path in OPEN_PATHS:
        return
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), server.api_key.encode()):
        raise ApiError(
            "invalid_api_key", "this server needs its API key as `Authorization: Bearer KEY` (server.api_key)"
        )


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    code = _CODE_OF_STATUS.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    match code:
        case "not_found":
            text = f"there is nothing at {request.path[:200]}"
        case "method_not_allowed":
            text = f"{request.method} is not allowed at {request.path[:200]}"
        case _:
            text = error.reason
    response = error_response(ApiError(code, text))
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def _internal(request: web.BaseRequest, error: BaseException | None) -> ApiError:
    _log.error("handler_failed", path=request.path, exc_info=error)
    return ApiError("server_error", "the server failed to handle this request; its log says why")
