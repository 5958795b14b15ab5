"""A target that speaks HTTP: any OpenAI-compatible server, streamed.

Owns connections and the reading of server-sent events. Times are taken as chunks arrive; nothing is retried, no
redirect is followed.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from epicycle.tools.bench_http import parse_counters
from epicycle.tools.replaying.errors import ReplayError
from epicycle.tools.replaying.facts import Facts, facts_of
from epicycle.tools.replaying.observed import Observed
from epicycle.tools.replaying.prompts import Outgoing

ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
DATA = b"data:"
LONGEST_EVENT_BYTES = 64 << 20


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    exit_depths: list[int] | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: dict[str, Any] | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class HttpTarget:
    """`async with`; one connection pool without a limit, since the schedule limits."""

    def __init__(self, base_url: str, *, api_key: str = "", timeout_s: float = 600.0, speaks: str = "auto") -> None:
        self.name = base_url
        self._base_url = base_url.removesuffix("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._speaks = speaks

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            self._base_url,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=30),
            connector=aiohttp.TCPConnector(limit=0),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def facts(self, model: str = "") -> Facts:
        """From the first model card, or that of `model`. Raises ReplayError."""
        try:
            async with self._session.get("/v1/models") as answer:
                if answer.status != 200:
                    raise ReplayError(f"{self.name}/v1/models: HTTP {answer.status}")
                cards = msgspec.convert(msgspec.json.decode(await answer.read()), _Models).data
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            raise ReplayError(f"{self.name}/v1/models: {str(error) or type(error).__name__}") from None
        card = next((one for one in cards if model in ("", one.get("id"))), None)
        if card is None:
            names = ", ".join(str(one.get("id")) for one in cards)
            raise ReplayError(f"model {model!r} is not one of {names or 'none'} (--model)")
        return facts_of(card, self._speaks, await self._version())

    async def _version(self) -> dict[str, Any]:
        """What the server says of its build and configuration; empty where it doesn't."""
        try:
            async with self._session.get("/version") as answer:
                return msgspec.json.decode(await answer.read(), type=dict[str, Any]) if answer.status == 200 else {}
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError):
            return {}

    async def counters(self) -> dict[str, float]:
        """Our server's totals; empty from other servers."""
        try:
            async with self._session.get("/metrics") as answer:
                return parse_counters(await answer.text()) if answer.status == 200 else {}
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return {}

    async def send(self, request: Outgoing, session: str, seen: Observed) -> None:
        """One request to its end; whatever happens is in `seen`."""
        headers = {"Content-Type": "application/json"}
        if session.isascii() and session.isprintable():
            headers |= {"X-Session-Affinity": session, "X-Correlation-ID": session} if session else {}
        body = msgspec.json.encode(request.body)
        try:
            post = self._session.post(ROUTES[request.route], data=body, headers=headers, allow_redirects=False)
            async with post as answer:
                seen.status = answer.status
                if answer.status != 200:
                    seen.fail(*refusal(answer.status, await answer.content.read(65_536)))
                    return
                await self._read(answer.content, seen)
        except TimeoutError:
            seen.fail("timeout", f"no end after {self._timeout_s:g} s (--timeout-s)")
        except (aiohttp.ClientError, OSError) as error:
            seen.fail("connection", str(error) or type(error).__name__)

    async def _read(self, content: aiohttp.StreamReader, seen: Observed) -> None:
        rest, is_done = b"", False
        async for chunk in content.iter_any():
            seen.byte()
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                is_done = take_line(line, seen) or is_done
            if len(rest) > LONGEST_EVENT_BYTES:
                seen.fail("bad_event", f"an event of more than {LONGEST_EVENT_BYTES} bytes")
                return
            await asyncio.sleep(0)  # other streams first, when one has much to say
        is_done = take_line(rest, seen) or is_done
        if not is_done:
            seen.fail("cut_off", "the stream ended without [DONE]")


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


def take_line(line: bytes, seen: Observed) -> bool:
    """One line of a stream; whether it was [DONE]."""
    if not line.startswith(DATA):
        return False
    data = line[len(DATA) :].strip()
    if data == b"[DONE]":
        return True
    try:
        event = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        seen.fail("bad_event", f"{error}: {data[:200]!r}")
        return False
    if event.error is not None:
        seen.fail(*_told(event.error))
    if event.usage is not None:
        seen.usage = event.usage
    for choice in event.choices or ():
        delta = choice.delta or _Delta()
        text, thought = choice.text or delta.content or "", delta.reasoning_content or ""
        seen.token(text, choice.token_ids or [], choice.exit_depths or [], thought=thought)
        seen.finish_reason = choice.finish_reason or seen.finish_reason
    return False


def refusal(status: int, content: bytes) -> tuple[str, str, int]:
    """Code, text and status of an answer that is no stream."""
    try:
        code, text = _told(msgspec.json.decode(content)["error"])
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        code, text = "", content[:300].decode(errors="replace")
    return code or f"http_{status}", text, status


def _told(error: Any) -> tuple[str, str]:
    if not isinstance(error, dict):
        return "error", str(error)
    return str(error.get("code") or error.get("type") or "error"), str(error.get("message") or error)
