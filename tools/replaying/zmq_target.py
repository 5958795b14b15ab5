"""A target that is reached over ZeroMQ through the embeddable client: a server of ours on this machine.

The model card comes over HTTP from the same server, since ZeroMQ has no such question.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from epicycle.tools.replaying.errors import ReplayError
from epicycle.tools.replaying.facts import Facts
from epicycle.tools.replaying.http_target import HttpTarget
from epicycle.tools.replaying.observed import Observed
from epicycle.tools.replaying.prompts import Outgoing
from epicycle.transport.client import AsyncClient
from epicycle.transport.errors import ClientError, RunDirError
from epicycle.transport.rundir import find_instance

UNSENT = ("stream", "stream_options")  # the client always streams, and always tells usage


class ZmqTarget:
    """`zmq://` (the only server that runs), `zmq://PORT` or `zmq:///RUN/DIR`."""

    def __init__(self, address: str, *, api_key: str = "", timeout_s: float = 600.0) -> None:
        self.name = address
        where = address.removeprefix("zmq://")
        if where and not where.startswith("/") and not where.isdecimal():
            raise ReplayError(f"{address!r}: use zmq://, zmq://PORT or zmq:///RUN/DIR")
        port, run_dir = (int(where), None) if where.isdecimal() else (None, where or None)
        try:
            found = find_instance(port, run_dir)
        except RunDirError as error:
            raise ReplayError(f"{address}: {error}") from None
        host = "127.0.0.1" if found.host in ("0.0.0.0", "::") else found.host
        self._http = HttpTarget(f"http://{host}:{found.port}", api_key=api_key, timeout_s=timeout_s)
        self._client = AsyncClient(run_dir=found.run_dir, timeout_s=timeout_s)

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()
        await self._http.__aexit__(kind, error, trace)

    async def facts(self, model: str = "") -> Facts:
        return await self._http.facts(model)

    async def counters(self) -> dict[str, float]:
        return await self._http.counters()

    async def send(self, request: Outgoing, session: str, seen: Observed) -> None:
        """One request to its end; whatever happens is in `seen`."""
        body = {name: value for name, value in request.body.items() if name not in UNSENT}
        try:
            async with self._stream(request.route, body) as stream:
                async for event in stream:
                    seen.byte()
                    seen.token(event.text, event.token_ids, event.exit_depths)
                    seen.finish_reason = event.finish_reason or seen.finish_reason
                seen.usage = (await stream.result()).usage
            seen.status = 200
        except ClientError as error:
            seen.fail(error.code, str(error), error.status)

    def _stream(self, route: str, body: dict[str, Any]) -> Any:
        if route == "chat":
            return self._client.stream_chat(body.pop("messages"), **body)
        return self._client.stream(body.pop("prompt"), **body)
