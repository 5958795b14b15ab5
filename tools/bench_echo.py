"""A bare aiohttp server that streams Server-Sent Events: the yardstick of `bench_hop`.

One token is one event is one JSON encode, exactly as the gateway does it, with nothing behind. It prints its port and
serves until it is terminated. Not a server for anybody else.
"""

from __future__ import annotations

import asyncio
import signal
import sys

import msgspec
import uvloop
from aiohttp import web


class EchoRequest(msgspec.Struct):
    max_tokens: int


async def stream_tokens(request: web.Request) -> web.StreamResponse:
    """`max_tokens` chunks shaped like a text completion's, then [DONE]; yields to the other streams after each."""
    wanted = msgspec.json.decode(await request.read(), type=EchoRequest, strict=False).max_tokens
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    encoder = msgspec.json.Encoder()
    for index in range(wanted):
        await response.write(b"data: " + encoder.encode(chunk(index)) + b"\n\n")
        await asyncio.sleep(0)
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def chunk(index: int) -> dict[str, object]:
    choice = {"index": 0, "text": " token", "logprobs": None, "finish_reason": None, "exit_depths": [index % 4 + 1]}
    return {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "echo", "choices": [choice]}


async def serve() -> None:
    app = web.Application()
    app.router.add_post("/v1/completions", stream_tokens)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    await runner.cleanup()


if __name__ == "__main__":
    uvloop.run(serve())
    sys.exit(0)
