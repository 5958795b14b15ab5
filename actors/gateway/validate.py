"""From a decoded body to a Spec: every range, every limit, tokenizing and chat rendering.

The one validator of HTTP and of the ZeroMQ clients. Long texts are tokenized on a thread, short ones inline. Must not
know links, tables or responses.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

import msgspec

from epicycle.actors import refusals
from epicycle.actors.gateway import ranges
from epicycle.actors.gateway.bodies import ChatBody, CompletionBody, Decoder
from epicycle.actors.gateway.chat import normalise
from epicycle.actors.gateway.defaults import COMPLETION_MAX_TOKENS
from epicycle.actors.gateway.errors import ApiError, invalid, unsupported
from epicycle.actors.gateway.loops import listed_depths, loop_bounds, with_trace
from epicycle.actors.gateway.neutral import refuse_unsupported
from epicycle.actors.gateway.ranges import real, whole
from epicycle.actors.gateway.served import Served
from epicycle.actors.gateway.spec import Prompt, Spec
from epicycle.actors.gateway.stops import StopSet
from epicycle.actors.gateway.tokenizer import ServedTokenizer
from epicycle.transport.config import Config
from epicycle.transport.wire.columns import F32, I32, pack
from epicycle.transport.wire.request import LoopBounds, Sampling

INLINE_CHARS = 4096  # about a millisecond of tokenizing
T = TypeVar("T")
AnyBody = CompletionBody | ChatBody


class Validator:
    """Stateless apart from its decoders and the thread pool it borrows."""

    def __init__(self, config: Config, threads: Executor) -> None:
        self._config = config
        self._threads = threads
        self._decode_completion = Decoder(CompletionBody)
        self._decode_chat = Decoder(ChatBody)

    async def completion(self, content: bytes, served: Served) -> Spec:
        """Raises ApiError."""
        body: CompletionBody = self._decode_completion(content)
        self._check_common(body, served)
        prompts = await self._prompts(body, served)
        return self._spec(body, served, prompts)

    async def chat(self, content: bytes, served: Served) -> Spec:
        """Raises ApiError."""
        body: ChatBody = self._decode_chat(content)
        self._check_common(body, served)
        prompt = await self._chat_prompt(body, served)
        return self._spec(body, served, [prompt])

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """Run `work` inline when `size` characters are few, on a thread otherwise."""
        if size <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _check_common(self, body: AnyBody, served: Served) -> None:
        check_model(body.model, served)
        refuse_unsupported(body)
        if body.stream_options is not None and not body.stream:
            raise invalid("stream_options", "stream_options is only for stream: true")

    async def _prompts(self, body: CompletionBody, served: Served) -> list[Prompt]:
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
        most = self._config.server.max_choices
        if len(items) > most or choices > most:
            text = f"{len(items)} prompts x n = {choices} choices, the limit is {most} (server.max_choices)"
            raise invalid("n" if len(items) <= most else "prompt", text)
        return [await self._prompt(item, body, served) for item in items]

    async def _prompt(self, item: str | list[int], body: CompletionBody, served: Served) -> Prompt:
        tokenizer = served.files.tokenizer
        if isinstance(item, str):
            adds = body.add_special_tokens is not False
            prompt = await self._encoded(item, served, adds_special_tokens=adds)
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

    async def _chat_prompt(self, body: ChatBody, served: Served) -> Prompt:
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

    def _spec(self, body: AnyBody, served: Served, prompts: list[Prompt]) -> Spec:
        facts, echo = served.facts, isinstance(body, CompletionBody) and bool(body.echo)
        n = 1 if body.n is None else whole("n", body.n, 1, self._config.server.max_choices, limit="server.max_choices")
        named, stop_ids = _stop_ids(body, served)
        limit_field, asked = _asked_max_tokens(body, echo)
        bounds, depths = loop_bounds(body, served), listed_depths(body, served)
        base = _sampling(body, served, stop_ids)
        samplings: list[Sampling] = []
        loops: list[LoopBounds] = []
        for prompt in prompts:
            max_tokens = _max_tokens(asked, limit_field, prompt, served, body, depths)
            min_tokens = whole("min_tokens", body.min_tokens or 0, 0, max_tokens, limit="max_tokens")
            samplings.append(msgspec.structs.replace(base, max_tokens=max_tokens, min_tokens=min_tokens))
            field = "exit_trace" if body.exit_trace is not None else "trace_id"
            loops.append(bounds if depths is None else with_trace(bounds, field, depths, max_tokens, facts))
        return Spec(
            is_chat=isinstance(body, ChatBody),
            model_id=served.files.model_id,
            prompts=prompts,
            n=n,
            samplings=samplings,
            loops=loops,
            stops=StopSet(_stops(body, served)),
            stop_ids=stop_ids,
            named_stop_ids=named,
            wants_logprobs=base.logprobs >= 0,
            echo=echo,
            is_stream=bool(body.stream),
            includes_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
            returns_token_ids=bool(body.return_token_ids),
            skips_special_tokens=body.skip_special_tokens is not False,
            priority=whole("priority", body.priority or 0, -ranges.PRIORITY_LIMIT, ranges.PRIORITY_LIMIT),
            noise_seed=_noise_seed(body, self._config),
            cache_salt=_salt(body.cache_salt),
        )


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


def _stops(body: AnyBody, served: Served) -> list[str]:
    stops = ranges.stop_strings(body.stop)
    if stops:
        need_tokenizer(served, "stop")
    return stops


def _stop_ids(body: AnyBody, served: Served) -> tuple[frozenset[int], frozenset[int]]:
    """(those the client named, all that end a sequence)."""
    facts = served.facts
    named = frozenset(ranges.token_ids("stop_token_ids", body.stop_token_ids or [], facts.vocab_size))
    every = named if body.ignore_eos else named | served.eos_ids
    if named and len(every) > facts.max_stop_ids:
        text = f"stop_token_ids and the end-of-sequence ids are {len(every)}, the limit is {facts.max_stop_ids}"
        raise invalid("stop_token_ids", text)
    return named, every


def _asked_max_tokens(body: AnyBody, echo: bool) -> tuple[str, int | None]:
    """(the field the client used, its value); 0 is legal with echo only: the prompt is scored and nothing made."""
    field, asked = "max_tokens", body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        field = "max_completion_tokens"
        if asked is not None and asked != body.max_completion_tokens:
            text = f"max_completion_tokens is {body.max_completion_tokens} and max_tokens {asked}; send one of them"
            raise invalid(field, text)
        asked = body.max_completion_tokens
    if asked is not None and asked < (0 if echo else 1):
        raise invalid(field, f"{field} is {asked}, must be at least 1 (0 only with echo on /v1/completions)")
    return field, asked


def _max_tokens(
    asked: int | None, field: str, prompt: Prompt, served: Served, body: AnyBody, depths: list[int] | None
) -> int:
    """The limit of one prompt: the asked one must fit, a default is clipped to what is left."""
    facts, length = served.facts, len(prompt.ids)
    source = "messages" if isinstance(body, ChatBody) else "prompt"
    if asked is None:
        left = facts.context_tokens - length
        if left < 1:
            text = f"the prompt has {length} tokens, the context is {facts.context_tokens} tokens"
            raise ApiError("context_length_exceeded", f"{text} (engine.context_tokens)", source)
        default = left if isinstance(body, ChatBody) else min(COMPLETION_MAX_TOKENS, left)
        return default if depths is None else min(default, len(depths))
    refusal = refusals.never_fits(0, length, asked, facts)
    if refusal is not None:
        raise ApiError(refusal.code, refusal.message, source if length >= facts.context_tokens else field)
    return asked


def _sampling(body: AnyBody, served: Served, stop_ids: frozenset[int]) -> Sampling:
    """Everything but the limits in tokens, which depend on the prompt."""
    facts, defaults = served.facts, served.defaults
    bias = ranges.logit_bias(body.logit_bias, facts.vocab_size, facts.max_logit_bias)
    alternatives = _alternatives(body, facts.max_logprobs)
    is_echo = isinstance(body, CompletionBody) and bool(body.echo)
    return Sampling(
        max_tokens=0,
        temperature=real("temperature", body.temperature, defaults.temperature),
        top_k=_top_k(body.top_k, defaults.top_k),
        top_p=real("top_p", body.top_p, defaults.top_p),
        min_p=real("min_p", body.min_p, 0.0),
        repetition_penalty=real("repetition_penalty", body.repetition_penalty, 1.0),
        presence_penalty=real("presence_penalty", body.presence_penalty, 0.0),
        frequency_penalty=real("frequency_penalty", body.frequency_penalty, 0.0),
        seed=secrets.randbits(63)
        if body.seed is None
        else whole("seed", body.seed, ranges.INT64_MIN, ranges.INT64_MAX),
        logprobs=alternatives,
        prompt_logprobs=alternatives if is_echo else -1,
        stop_ids=pack(I32, sorted(stop_ids)),
        logit_bias_ids=pack(I32, bias),
        logit_bias_values=pack(F32, bias.values()),
    )


def _alternatives(body: AnyBody, most: int) -> int:
    """Alternatives per token, -1 for no logprobs."""
    if isinstance(body, CompletionBody):
        return -1 if body.logprobs is None else whole("logprobs", body.logprobs, 0, most)
    if not body.logprobs:
        if body.top_logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
        return -1
    return whole("top_logprobs", body.top_logprobs or 0, 0, most)


def _top_k(asked: int | None, default: int) -> int:
    if asked is None:
        return default
    whole("top_k", asked, -1, (1 << 31) - 1)
    return max(0, asked)


def _noise_seed(body: AnyBody, config: Config) -> int:
    if body.noise_seed is None:
        return config.engine.noise_seed
    return whole("noise_seed", body.noise_seed, 0, ranges.INT64_MAX)


def _salt(salt: str | None) -> str:
    if salt is not None and len(salt) > ranges.SALT_LIMIT:
        raise invalid("cache_salt", f"cache_salt has {len(salt)} characters, the limit is {ranges.SALT_LIMIT}")
    return salt or ""
