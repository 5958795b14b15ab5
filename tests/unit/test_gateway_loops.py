"""Defaults of the model folder, loop bounds, and prescribed depths."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from epicycle.actors.gateway.bodies import CompletionBody
from epicycle.actors.gateway.defaults import resolve_defaults
from epicycle.actors.gateway.errors import ApiError
from epicycle.actors.gateway.loops import listed_depths, loop_bounds, with_trace
from epicycle.actors.gateway.served import Served, load_files, serve
from epicycle.actors.mock_model import mock_capabilities
from epicycle.transport.config import Config
from epicycle.transport.wire.columns import U16, unpack_list
from epicycle.transport.wire.control import Capabilities

FACTS = mock_capabilities(Config())
FILES = load_files(Config())


def served(generation: dict[str, Any] | None = None, **facts: Any) -> Served:
    files = FILES if generation is None else files_with(generation)
    return serve(files, msgspec.structs.replace(FACTS, **facts))


def files_with(generation: dict[str, Any]) -> Any:
    return type(FILES)(FILES.model_id, FILES.tokenizer, FILES.template, generation, {"known": [4, 2, 3]})


def body(**fields: Any) -> CompletionBody:
    return CompletionBody(prompt="a", **fields)


def facts(**fields: Any) -> Capabilities:
    return msgspec.structs.replace(FACTS, **fields)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, (1.0, 1.0, 0, 1.0, 2, 4)),
        ({"do_sample": False}, (0.0, 1.0, 0, 1.0, 2, 4)),
        ({"do_sample": False, "temperature": 0.6}, (0.6, 1.0, 0, 1.0, 2, 4)),
        ({"do_sample": True, "top_p": 0.9, "top_k": 40}, (1.0, 0.9, 40, 1.0, 2, 4)),
        ({"exit_threshold": 0.7, "min_loops": 1, "max_loops": 3}, (1.0, 1.0, 0, 0.7, 1, 3)),
        ({"min_loops": 9, "max_loops": 9, "top_k": -1}, (1.0, 1.0, 0, 1.0, 4, 4)),
    ],
)
def test_defaults_come_from_the_folder_else_are_plain(generation: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert expected == msgspec.structs.astuple(resolve_defaults(generation, FACTS))


def test_defaults_never_ask_for_what_the_model_cannot_do() -> None:
    assert 1.0 == resolve_defaults({"exit_threshold": 0.5}, facts(can_exit_early=False)).exit_threshold
    assert (1, 1) == msgspec.structs.astuple(resolve_defaults({}, facts(loops=1)))[-2:]


def test_max_loops_alone_lowers_the_default_minimum() -> None:
    bounds = loop_bounds(body(max_loops=1), served({}))
    assert (1, 1) == (bounds.min_loops, bounds.max_loops)


def test_early_exit_is_refused_where_the_rule_has_none() -> None:
    with pytest.raises(ApiError, match="can't exit early") as caught:
        loop_bounds(body(exit_threshold=0.9), served({}, can_exit_early=False))
    assert "exit_threshold" == caught.value.param
    assert 1.0 == loop_bounds(body(exit_threshold=1.0), served({}, can_exit_early=False)).exit_threshold


def test_traces_are_found_by_id_or_given_inline() -> None:
    tracing = served({}, exit_rule="trace")
    assert [4, 2, 3] == listed_depths(body(trace_id="known"), tracing)
    assert [4, 1] == listed_depths(body(exit_trace=[4, 1]), tracing)
    assert listed_depths(body(), tracing) is None


@pytest.mark.parametrize(
    ("fields", "rule", "param"),
    [
        ({"trace_id": "unknown"}, "trace", "trace_id"),
        ({"trace_id": "known"}, "ouro", "trace_id"),
        ({"exit_trace": [4]}, "ouro", "exit_trace"),
        ({"exit_trace": [4], "trace_id": "known"}, "trace", "trace_id"),
    ],
)
def test_traces_that_cannot_be_used_are_refused(fields: dict[str, Any], rule: str, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        listed_depths(body(**fields), served({}, exit_rule=rule))
    assert (400, param) == (caught.value.status, caught.value.param)


@pytest.mark.parametrize(
    ("depths", "text"),
    [([4, 2], "lists 2 depths"), ([3, 2, 2], r"\[0\] is 3"), ([4, 0, 2], r"\[1\] is 0"), ([4, 2, 5], r"\[2\] is 5")],
)
def test_depths_that_cannot_be_followed_name_entry_and_value(depths: list[int], text: str) -> None:
    bounds = loop_bounds(body(), served({}, exit_rule="trace"))
    with pytest.raises(ApiError, match=text):
        with_trace(bounds, "exit_trace", depths, 3, FACTS)


def test_longer_traces_are_cut_to_the_outputs() -> None:
    bounds = loop_bounds(body(), served({}, exit_rule="trace"))
    assert [4, 1, 2] == unpack_list(U16, with_trace(bounds, "exit_trace", [4, 1, 2, 9], 3, FACTS).exit_trace)
