"""Chat messages to a prompt: normalised, then rendered by the model's own template in a sandbox.

Owns the compiled template and what can be learned from it once: whether it walks content parts itself, and which token
ends a turn. Must not know requests or sampling.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from epicycle.actors.gateway.bodies import Message
from epicycle.actors.gateway.errors import ApiError, invalid
from epicycle.actors.gateway.tokenizer import ServedTokenizer

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_PROBE = "epicycle"


class ChatTemplate:
    """A compiled template. Rendering is pure."""

    def __init__(self, source: str, tokens: dict[str, str]) -> None:
        environment = _environment()
        self.source = source
        self._tokens = tokens
        self._template = environment.from_string(source)
        self.wants_parts = _walks_content(environment.parse(source))

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, is_open: bool) -> str:
        """`is_open`: end with the opening of the assistant's turn. Raises ApiError 400 with the template's reason."""
        try:
            return self._template.render(
                messages=messages, tools=tools or None, add_generation_prompt=is_open, **self._tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise invalid("messages", f"the model's chat template refuses these messages: {error}") from error

    def turn_end(self, tokenizer: ServedTokenizer) -> int | None:
        """The special token that the template puts behind an assistant's message; None when there is none."""
        answer: Any = [{"type": "text", "text": _PROBE}] if self.wants_parts else _PROBE
        try:
            text = self.render(
                [{"role": "user", "content": answer}, {"role": "assistant", "content": answer}], None, is_open=False
            )
        except ApiError:
            return None
        tail = tokenizer.encode(text.rpartition(_PROBE)[2], add_special_tokens=False)
        return tail[0] if tail and tail[0] in tokenizer.special_ids else None


def load_template(tokenizer: ServedTokenizer | None) -> ChatTemplate | None:
    """The template of tokenizer_config.json (the one named "default" of several); None when there is none."""
    source = tokenizer.config.get("chat_template") if tokenizer is not None else None
    if isinstance(source, list):
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    if tokenizer is None or not source:
        return None
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    tokens = {name: _token_text(tokenizer.config.get(name)) for name in names}
    return ChatTemplate(source, tokens)


def normalise(messages: list[Message], *, wants_parts: bool) -> list[dict[str, Any]]:
    """Messages as the template expects them. Raises ApiError for a role or a content that can't be served."""
    if not messages:
        raise invalid("messages", "messages is empty; it needs at least one message")
    return [_plain(message, f"messages[{at}]", wants_parts) for at, message in enumerate(messages)]


def _plain(message: Message, where: str, wants_parts: bool) -> dict[str, Any]:
    if message.role not in ROLES:
        raise invalid("messages", f"{where}.role is {message.role!r}; known roles are {', '.join(ROLES)}")
    text = _content_text(message, where)
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    plain["content"] = [{"type": "text", "text": text}] if wants_parts else text
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [_tool_call(call, where) for call in message.tool_calls]
    return plain


def _content_text(message: Message, where: str) -> str:
    if message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    for at, part in enumerate(message.content):
        if part.type not in ("text", "input_text", "output_text") or part.text is None:
            raise invalid("messages", f"{where}.content[{at}] has type {part.type!r}; only text parts can be served")
    return "".join(part.text or "" for part in message.content)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """Arguments travel as JSON text; templates want the object."""
    plain: dict[str, Any] = msgspec.to_builtins(call)
    arguments = plain["function"]["arguments"]
    if isinstance(arguments, str):
        try:
            plain["function"]["arguments"] = json.loads(arguments) if arguments else {}
        except ValueError:
            raise invalid("messages", f"{where}.tool_calls has arguments that are not JSON") from None
    return plain


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _walks_content(tree: nodes.Template) -> bool:
    """Whether the template loops over a message's content: it then wants parts, not a string."""
    return any(_names_content(loop.iter) for loop in tree.find_all(nodes.For))


def _names_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"


def _token_text(token: Any) -> str:
    """tokenizer_config.json names a token by its text or by an object that holds it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token or ""
