"""Prompts of requests to ids: four forms on completions, rendered messages on chat.

Long texts are tokenized on a thread, short ones inline, so that nobody's prompt stops the others' tokens. Must not know
sampling or limits other than the vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import TypeVar

from epicycle.actors.gateway import ranges
from epicycle.actors.gateway.bodies import ChatBody, CompletionBody
from epicycle.actors.gateway.chat import normalise
from epicycle.actors.gateway.errors import ApiError, invalid, unsupported
from epicycle.actors.gateway.served import Served
from epicycle.actors.gateway.spec import Prompt
from epicycle.actors.gateway.tokenizer import ServedTokenizer

INLINE_CHARS = 4096  # about a millisecond of tokenizing
T = TypeVar("T")


class PromptReader:
    """Borrows a thread pool. Every method raises ApiError."""

    def __init__(self, threads: Executor, max_choices: int) -> None:
        self._threads = threads
        self._max_choices = max_choices

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """Run `work` inline when `size` characters are few, on a thread otherwise."""
        if size <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def completion(self, body: CompletionBody, served: Served) -> list[Prompt]:
        given = body.prompt
        if given is None:
            raise invalid("prompt", "prompt is missing")
        items: Sequence[str | list[int]]
        match given:
            case str():
                items = [given]
            case [int(), *_]:
                items = [_ids(given)]
            case [str(), *_]:
                items = [item if isinstance(item, str) else _mixed("") for item in given]
            case [list(), *_]:
                items = [item if isinstance(item, list) else _mixed([0]) for item in given]
            case _:
                raise invalid("prompt", "prompt is an empty list")
        choices = len(items) * (1 if body.n is None else body.n)
        most = self._max_choices
        if len(items) > most or choices > most:
            text = f"{len(items)} prompts x n = {choices} choices, the limit is {most} (server.max_choices)"
            raise invalid("n" if len(items) <= most else "prompt", text)
        return [await self._prompt(item, body, served) for item in items]

    async def _prompt(self, item: str | list[int], body: CompletionBody, served: Served) -> Prompt:
        tokenizer = served.files.tokenizer
        if isinstance(item, str):
            adds = body.add_special_tokens is not False
            prompt = replace(await self._encoded(item, served, adds_special_tokens=adds), is_text=adds)
        else:
            ids = ranges.token_ids("prompt", item, served.facts.vocab_size)
            text = ""
            if tokenizer is not None and body.echo:
                text = await self.off_loop(len(ids), lambda: tokenizer.decode(ids))
            prompt = Prompt(ids, text)
        if not prompt.ids:
            raise invalid("prompt", "the prompt has no tokens; it needs at least 1")
        return prompt

    async def _encoded(self, text: str, served: Served, *, adds_special_tokens: bool) -> Prompt:
        tokenizer = need_tokenizer(served, "prompt")
        ids = await self.off_loop(len(text), lambda: tokenizer.encode(text, add_special_tokens=adds_special_tokens))
        return Prompt(ranges.token_ids("prompt", ids, served.facts.vocab_size), text)

    async def chat(self, body: ChatBody, served: Served) -> Prompt:
        need_tokenizer(served, "messages")
        template = served.files.template
        if template is None:
            raise invalid("messages", f"{served.files.model_id} has no chat template; use /v1/completions")
        if body.messages is None:
            raise invalid("messages", "messages is missing")
        messages = normalise(body.messages, wants_parts=template.wants_parts)
        size = sum(len(str(message["content"])) for message in messages)
        text = await self.off_loop(size, lambda: template.render(messages, body.tools, is_open=True))
        if body.tools:
            plain = await self.off_loop(size, lambda: template.render(messages, None, is_open=True))
            if plain == text:
                raise unsupported("tools", "the model's chat template ignores tools; leave the field out")
        prompt = await self._encoded(text, served, adds_special_tokens=body.add_special_tokens is True)
        if not prompt.ids:
            raise invalid("messages", "the rendered messages have no tokens")
        return prompt


def check_model(model: str | None, served: Served) -> None:
    if model is not None and model != served.files.model_id:
        text = f"model {model[:100]!r} is not served here; the served model is {served.files.model_id!r}"
        raise ApiError("model_not_found", text, "model")


def need_tokenizer(served: Served, field: str) -> ServedTokenizer:
    if served.files.tokenizer is None:
        text = f"{served.files.model_id} has no tokenizer.json: send token ids as `prompt` of /v1/completions"
        raise invalid(field, text)
    return served.files.tokenizer


def _mixed(_kind: T) -> T:
    raise invalid("prompt", "prompt mixes texts, ids and lists; send one kind")


def _ids(given: list[str | int | list[int]]) -> list[int]:
    return [item if isinstance(item, int) else _mixed(0) for item in given]
