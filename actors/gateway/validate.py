"""From a decoded body to a Spec: every range and every limit of a request, prompts and loop controls included.

The one validator of HTTP and of the ZeroMQ clients. Must not know links, tables or responses.
"""

from __future__ import annotations

import secrets
from concurrent.futures import Executor

import msgspec

from epicycle.actors.gateway import ranges
from epicycle.actors.gateway.bodies import ChatBody, CompletionBody, Decoder
from epicycle.actors.gateway.errors import invalid
from epicycle.actors.gateway.limits import asked_max_tokens, max_tokens_of
from epicycle.actors.gateway.loops import listed_depths, loop_bounds, with_trace
from epicycle.actors.gateway.neutral import refuse_unsupported
from epicycle.actors.gateway.prompts import PromptReader, check_model, need_tokenizer
from epicycle.actors.gateway.ranges import real, whole
from epicycle.actors.gateway.served import Served
from epicycle.actors.gateway.spec import Prompt, Spec
from epicycle.actors.gateway.stops import StopSet
from epicycle.transport.config import Config
from epicycle.transport.wire.columns import F32, I32, pack
from epicycle.transport.wire.request import LoopBounds, Sampling

AnyBody = CompletionBody | ChatBody


class Validator:
    """Stateless apart from its decoders and the thread pool it borrows."""

    def __init__(self, config: Config, threads: Executor) -> None:
        self._config = config
        self.prompts = PromptReader(threads, config.server.max_choices)
        self._decode_completion = Decoder(CompletionBody)
        self._decode_chat = Decoder(ChatBody)

    async def completion(self, content: bytes, served: Served) -> Spec:
        """Raises ApiError."""
        body: CompletionBody = self._decode_completion(content)
        self._check_common(body, served)
        prompts = await self.prompts.completion(body, served)
        return self._spec(body, served, prompts)

    async def chat(self, content: bytes, served: Served) -> Spec:
        """Raises ApiError."""
        body: ChatBody = self._decode_chat(content)
        self._check_common(body, served)
        prompt = await self.prompts.chat(body, served)
        return self._spec(body, served, [prompt])

    def _check_common(self, body: AnyBody, served: Served) -> None:
        check_model(body.model, served)
        refuse_unsupported(body)
        if body.stream_options is not None and not body.stream:
            raise invalid("stream_options", "stream_options is only for stream: true")

    def _spec(self, body: AnyBody, served: Served, prompts: list[Prompt]) -> Spec:
        facts, echo = served.facts, isinstance(body, CompletionBody) and bool(body.echo)
        n = 1 if body.n is None else whole("n", body.n, 1, self._config.server.max_choices, limit="server.max_choices")
        named, stop_ids = _stop_ids(body, served)
        limit_field, asked = asked_max_tokens(body, echo)
        bounds, depths = loop_bounds(body, served), listed_depths(body, served)
        base = _sampling(body, served, stop_ids)
        samplings: list[Sampling] = []
        loops: list[LoopBounds] = []
        for prompt in prompts:
            max_tokens = max_tokens_of(asked, limit_field, prompt, served, body, depths)
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
            cache_salt=_label("cache_salt", body.cache_salt),
            session_id=_label("session_id", body.session_id),
            conversation=body.session_id or "",
            messages=body.messages if isinstance(body, ChatBody) else None,
            tools=body.tools if isinstance(body, ChatBody) else None,
        )


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


def _label(field: str, text: str | None) -> str:
    if text is not None and len(text) > ranges.LABEL_LIMIT:
        raise invalid(field, f"{field} has {len(text)} characters, the limit is {ranges.LABEL_LIMIT}")
    return text or ""
