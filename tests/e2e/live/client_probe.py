"""A program that embeds epicycle's client where neither torch nor aiohttp can be imported: `client_probe.py RUN_DIR`.

Prints what it got as one JSON object. Run by test_embeddable_client.py in a process of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from typing import Any

if __name__ == "__main__":  # before anything of epicycle is imported, and not where a test only reads STORY
    for name in ("torch", "aiohttp", "structlog", "uvloop", "tokenizers", "prometheus_client"):
        sys.modules[name] = None  # type: ignore[assignment]

import epicycle

STORY = {"max_tokens": 10, "temperature": 0.9, "seed": 4, "exit_threshold": 0.5, "logprobs": 1}
SUM = [{"role": "user", "content": "What is 2 plus 3?"}]


def plain(result: Any) -> dict[str, Any]:
    return dataclasses.asdict(result)


def blocking(run_dir: str) -> dict[str, Any]:
    with epicycle.Client(run_dir=run_dir) as client:
        told: dict[str, Any] = {
            "text": plain(client.generate("Once upon a time", **STORY)),
            "ids": plain(client.generate([906, 1035, 260, 507], **STORY, n=2)),
            "chat": plain(client.chat(SUM, max_tokens=20, temperature=0)),
        }
        told["stream"] = [dataclasses.asdict(event) for event in client.stream("Once upon a time", **STORY)]
        told["stream_chat"] = "".join(event.text for event in client.stream_chat(SUM, max_tokens=20, temperature=0))
        with client.stream("Once upon a time", max_tokens=900, ignore_eos=True, exit_threshold=1.0) as long:
            next(long)
            next(long)
            long.cancel()
            cancelled = long.result()
        told["cancelled"] = plain(cancelled)
        told["status"] = client.health().status
        told["deep"] = [actor.name for actor in client.health(is_deep=True).actors if actor.hop_ms >= 0]
        try:
            client.generate("Once upon a time", max_tokens=5000)
        except epicycle.transport.client.ClientError as error:
            told["refused"] = [error.code, error.status]
    return told


async def on_a_loop(run_dir: str) -> dict[str, Any]:
    async with epicycle.AsyncClient(run_dir=run_dir) as client:
        text, chat = await asyncio.gather(
            client.generate("Once upon a time", **STORY), client.chat(SUM, max_tokens=20, temperature=0)
        )
        events = [event async for event in client.stream("Once upon a time", **STORY)]
        return {"text": plain(text), "chat": plain(chat), "stream": [dataclasses.asdict(event) for event in events]}


if __name__ == "__main__":
    print(json.dumps({"sync": blocking(sys.argv[1]), "async": asyncio.run(on_a_loop(sys.argv[1]))}))
