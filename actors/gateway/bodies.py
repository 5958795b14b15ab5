"""The JSON bodies of requests as strict structs, and their decoding with errors that name the field.

Types are checked here (a bool is no number, 1.0 no integer, unknown fields are refused), ranges in `validate`.
Fields typed `object` are known but not offered: their neutral values pass, anything else is refused there.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from epicycle.actors.gateway.errors import ApiError, invalid, unsupported

B = TypeVar("B")

_AT = re.compile(r" - at `\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `(.*?)`")
_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u....)\\u[dD][c-fC-F]")


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What requests of one route have in common with none of the others: strictness only."""


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: object = None
    continuous_usage_stats: object = None


class Generation(Body):
    """Fields of both generating routes. None: not given (or null), the default applies."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    min_loops: int | None = None
    max_loops: int | None = None
    exit_threshold: float | None = None
    exit_trace: list[int] | None = None
    trace_id: str | None = None
    noise_seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    return_token_ids: bool | None = None
    # Harmless: taken and ignored.
    user: object = None
    metadata: object = None
    store: object = None
    service_tier: object = None
    safety_identifier: object = None
    prompt_cache_key: object = None
    # Known, refused unless neutral.
    best_of: object = None
    use_beam_search: object = None
    length_penalty: object = None
    early_stopping: object = None
    include_stop_str_in_output: object = None
    spaces_between_special_tokens: object = None
    truncate_prompt_tokens: object = None
    prompt_logprobs: object = None
    response_format: object = None
    bad_words: object = None


class CompletionBody(Generation):
    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: object = None


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class ToolFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: object = None


class ToolCall(msgspec.Struct, kw_only=True):
    function: ToolFunction
    id: str | None = None
    type: str = "function"


class Message(msgspec.Struct, kw_only=True):
    """Unknown fields are let through to nowhere: clients send back what servers once added to an answer."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ChatBody(Generation):
    messages: list[Message] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: object = None
    parallel_tool_calls: object = None
    functions: object = None
    function_call: object = None
    modalities: object = None
    audio: object = None
    prediction: object = None
    reasoning_effort: object = None
    verbosity: object = None
    web_search_options: object = None
    chat_template: object = None
    chat_template_kwargs: object = None
    add_generation_prompt: object = None
    continue_final_message: object = None
    echo: object = None


class TokenizeBody(Body):
    prompt: str
    model: str | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    tokens: list[int]
    model: str | None = None


class Decoder:
    """Decodes the bodies of one route."""

    def __init__(self, kind: type[B]) -> None:
        self._decoder = msgspec.json.Decoder(kind)

    def __call__(self, content: bytes) -> Any:
        """Raises ApiError 400; its param is the field at fault where that is known."""
        try:
            return self._decoder.decode(content)
        except msgspec.ValidationError as error:
            raise _refusal(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise invalid(None, _syntax_text(content, str(error))) from None
        except RecursionError:
            raise invalid(None, "the body's JSON is nested too deeply") from None


def _refusal(text: str) -> ApiError:
    unknown = _UNKNOWN.search(text)
    if unknown:
        return unsupported(unknown[1])
    at = _AT.search(text)
    field = re.split(r"[.\[]", at[1])[0] if at else ""
    return invalid(field or None, text)


def _syntax_text(content: bytes, reason: str) -> str:
    lone = _SURROGATE.search(content)
    if lone:
        return f"the body has a lone surrogate escape at byte {lone.start()}; it is no character"
    return f"the body is not valid JSON: {reason}"
