"""The load of `bench_hop`: N concurrent streams over plain sockets, counting events and nothing else.

Runs in a process of its own, because its work is neither the server's nor the yardstick's. Reads bytes and counts
`data:` frames that carry tokens; knows no OpenAI client. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from functools import partial
from typing import cast

import uvloop

DONE = b"data: [DONE]"


class Stream(asyncio.Protocol):
    """One request, one streamed answer; counts event frames until [DONE]."""

    def __init__(self, request: bytes, finished: asyncio.Future[int]) -> None:
        self._request = request
        self._finished = finished
        self._events = 0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.WriteTransport", transport).write(self._request)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        text = self._tail + data
        self._events += text.count(b"data: {")
        self._tail = text[-len(DONE) :] if DONE not in text else b""
        # A frame's head may be cut at the seam; what the tail already counted must not count twice.
        self._events -= self._tail.count(b"data: {")
        if DONE in text and not self._finished.done():
            self._finished.set_result(self._events)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._finished.done():
            self._finished.set_exception(exc or ConnectionResetError("the stream ended without [DONE]"))


async def load(port: int, streams: int, tokens: int) -> dict[str, float]:
    """Run all streams at once; returns the events counted and the seconds from first byte sent to last [DONE]."""
    body = json.dumps({"prompt": [5, 6, 7, 8], "max_tokens": tokens, "stream": True, "ignore_eos": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    finished: list[asyncio.Future[int]] = [loop.create_future() for _ in range(streams)]
    started = time.perf_counter()
    for future in finished:
        await loop.create_connection(partial(Stream, head.encode() + body, future), "127.0.0.1", port)
    counts = await asyncio.gather(*finished)
    return {"events": sum(counts), "seconds": time.perf_counter() - started}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    arguments = parser.parse_args(argv)
    print(json.dumps(uvloop.run(load(arguments.port, arguments.streams, arguments.tokens))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
