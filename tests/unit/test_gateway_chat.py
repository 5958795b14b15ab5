"""Messages become a prompt: contents normalised, templates sandboxed, turn ends found."""

from __future__ import annotations

from typing import Any

import pytest

from epicycle.actors.gateway.bodies import ContentPart, Message, ToolCall, ToolFunction
from epicycle.actors.gateway.chat import ChatTemplate, load_template, normalise
from epicycle.actors.gateway.errors import ApiError
from epicycle.actors.gateway.tokenizer import load_tokenizer
from epicycle.actors.model_folder import model_folder

LOOP = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
PARTS = "{% for m in messages %}{% for p in m['content'] %}<{{ p.text }}>{% endfor %}{% endfor %}"


def rendered(source: str, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
    template = ChatTemplate(source, {})
    return template.render(normalise(messages, wants_parts=template.wants_parts), tools, is_open=True)


def test_string_parts_and_null_become_strings() -> None:
    parts = [ContentPart(type="text", text="a"), ContentPart(type="text", text="b")]
    messages = [Message(role="system", content="s"), Message(role="user", content=parts), Message(role="assistant")]
    assert "[system:s][user:ab][assistant:]" == rendered(LOOP, messages)


def test_template_that_walks_parts_gets_parts() -> None:
    assert "<hello>" == rendered(PARTS, [Message(role="user", content="hello")])


def test_developer_is_the_system_role() -> None:
    assert "[system:x]" == rendered(LOOP, [Message(role="developer", content="x")])


def test_tool_arguments_reach_the_template_as_objects() -> None:
    call = ToolCall(function=ToolFunction(name="f", arguments='{"x": 1}'))
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}{% endfor %}"
    )
    assert "1" == rendered(source, [Message(role="assistant", tool_calls=[call])])
    bad = ToolCall(function=ToolFunction(name="f", arguments="{"))
    with pytest.raises(ApiError, match="not JSON"):
        rendered(source, [Message(role="assistant", tool_calls=[bad])])


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[99].content }}",
        "{{ undefined_name.field }}",
    ],
)
def test_template_trouble_is_a_400(source: str) -> None:
    with pytest.raises(ApiError) as caught:
        rendered(source, [Message(role="user", content="x")])
    assert (400, "messages") == (caught.value.status, caught.value.param)


def test_user_text_is_never_a_template() -> None:
    assert "[user:{{ 7 * 7 }}]" == rendered(LOOP, [Message(role="user", content="{{ 7 * 7 }}")])


def test_embedded_template_ends_turns_with_im_end() -> None:
    tokenizer = load_tokenizer(model_folder("embedded:ouro"))
    assert tokenizer is not None
    template = load_template(tokenizer)
    assert template is not None
    assert tokenizer.id_of("<|im_end|>") == template.turn_end(tokenizer)
    text = template.render([{"role": "user", "content": "hi"}], None, is_open=True)
    assert "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" == text
