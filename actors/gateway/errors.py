"""The errors clients see: one exception with status, code and text, and its OpenAI-shaped body.

Owns the table from codes to HTTP statuses. Must not know HTTP objects or links, so that the ZeroMQ clients share it.
"""

from __future__ import annotations

import msgspec

from epicycle.actors.errors import ActorError

STATUS_OF_CODE = {
    "invalid_request_error": 400,
    "context_length_exceeded": 400,
    "unsupported_field": 400,
    "invalid_api_key": 401,
    "forbidden": 403,
    "model_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "request_too_large": 413,
    "unsupported_media_type": 415,
    "overloaded": 429,
    "headers_too_large": 431,
    "server_error": 500,
    "not_ready": 503,
    "draining": 503,
    "engine_lost": 503,
    "slow_client": 503,
    "cancelled": 503,
    "timeout": 504,
}
RETRY_AFTER_S = {"overloaded": 1, "not_ready": 1, "draining": 5, "engine_lost": 1}
_TYPE_OF_STATUS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class ApiError(ActorError):
    """A request that ends badly. `param` names the field at fault; `retry_after_s` > 0 where waiting helps."""

    def __init__(self, code: str, message: str, param: str | None = None, retry_after_s: int = -1) -> None:
        super().__init__(message)
        self.code = code if code in STATUS_OF_CODE else "server_error"
        self.status = STATUS_OF_CODE[self.code]
        self.message = message
        self.param = param
        self.retry_after_s = RETRY_AFTER_S.get(self.code, 0) if retry_after_s < 0 else retry_after_s

    def body(self) -> bytes:
        """The JSON of an HTTP error body, also the data of an SSE error event."""
        plain = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPE_OF_STATUS.get(self.status, plain)
        return msgspec.json.encode({"error": ErrorBody(self.message, kind, self.param, self.code)})


def invalid(param: str | None, message: str) -> ApiError:
    return ApiError("invalid_request_error", message, param)


def unsupported(field: str, why: str = "") -> ApiError:
    return ApiError("unsupported_field", why or f"field {field!r} is not supported by this server", field)
