"""Fields that are known but not offered: the values of theirs that change nothing pass, the rest is refused by name."""

from __future__ import annotations

from collections.abc import Callable

from epicycle.actors.gateway.bodies import ChatBody, CompletionBody
from epicycle.actors.gateway.errors import unsupported

Check = Callable[[object], bool]


def _is(*values: object) -> Check:
    """Equal in value and in kind: 1 is not true."""
    return lambda value: any(value == neutral and type(value) is type(neutral) for neutral in values)


def _any(_value: object) -> bool:
    return True


NEUTRAL: dict[str, Check] = {
    "best_of": _is(1),
    "use_beam_search": _is(False),
    "length_penalty": _is(1, 1.0),
    "early_stopping": _is(False),
    "include_stop_str_in_output": _is(False),
    "spaces_between_special_tokens": _is(True, False),
    "truncate_prompt_tokens": _is(),
    "prompt_logprobs": _is(),
    "response_format": _is({"type": "text"}),
    "bad_words": _is([]),
    "suffix": _is(""),
    "tool_choice": _is("auto", "none"),
    "parallel_tool_calls": _is(True, False),
    "functions": _is([]),
    "function_call": _is("auto", "none"),
    "modalities": _is(["text"]),
    "audio": _is(),
    "prediction": _is(),
    "reasoning_effort": _is("none"),
    "verbosity": _is("medium"),
    "web_search_options": _is(),
    "chat_template": _is(""),
    "chat_template_kwargs": _is({}),
    "add_generation_prompt": _is(True),
    "continue_final_message": _is(False),
}
NEUTRAL_STREAM_OPTIONS: dict[str, Check] = {
    "include_obfuscation": _any,
    "continuous_usage_stats": _is(False),
}


def refuse_unsupported(body: CompletionBody | ChatBody) -> None:
    """Raises ApiError 400 `unsupported_field` naming the first field that asks for what is not offered."""
    for field, is_neutral in NEUTRAL.items():
        value = getattr(body, field, None)
        if value is not None and not (is_neutral(value) or (field == "best_of" and value == body.n)):
            raise unsupported(field, f"field {field!r} is not supported; leave it out")
    if isinstance(body, ChatBody) and body.echo not in (None, False):
        raise unsupported("echo", "field 'echo' is for /v1/completions; leave it out")
    if body.stream_options is not None:
        for field, is_neutral in NEUTRAL_STREAM_OPTIONS.items():
            value = getattr(body.stream_options, field)
            if value is not None and not is_neutral(value):
                raise unsupported("stream_options", f"stream_options.{field} is not supported; leave it out")
