"""Rows as requests: made-up blocks, threaded histories, limits, bodies for our server and for others."""

from __future__ import annotations

from typing import Any

import pytest

from epicycle.tools.replaying.errors import ReplayError
from epicycle.tools.replaying.facts import Facts, facts_of
from epicycle.tools.replaying.prompts import BodyOptions, Outgoing, Prompts
from epicycle.tools.replaying.schedule import Held
from epicycle.tools.replaying.sessions import Session
from epicycle.tools.replaying.synthesis import Synthesis
from epicycle.transport.trace_rows import TraceRow
from tests.fakes.replay import row

OURS = Facts(model="m", speaks="epicycle", vocab_size=500, special_ids=(0, 2), loops=4, exit_rule="ouro")


def held(one: TraceRow, parent: str = "") -> Held:
    return Held(one.request_id, 1, one, Session(one.session_id or "s", 0), parent=parent)


def prompts(facts: Facts = OURS, **options: Any) -> Prompts:
    return Prompts(BodyOptions(**({"salt": "salt"} | options)), facts)


def make(maker: Prompts, one: Held) -> Outgoing:
    made = maker.make(one)
    assert made is not None
    return made


def body(one: TraceRow, facts: Facts = OURS, **options: Any) -> dict[str, Any]:
    return make(prompts(facts, **options), held(one)).body


def test_equal_leading_hashes_give_equal_leading_blocks_and_the_last_is_cut() -> None:
    made = Synthesis("salt", 500)
    one, two = made.blocks("", [1, 2, 3], 16, 40), made.blocks("", [1, 2, 4], 16, 48)
    assert (40, 48) == (len(one), len(two))
    assert one[:32] == two[:32]
    assert one[32:] != two[32:40]
    assert one == Synthesis("salt", 500).blocks("", [1, 2, 3], 16, 40)


def test_other_salts_scopes_and_hashes_give_other_blocks() -> None:
    made = Synthesis("salt", 500)
    blocks = [
        made.blocks("", [1], 16, 16),
        made.blocks("", [2], 16, 16),
        made.blocks("file", [1], 16, 16),
        Synthesis("other", 500).blocks("", [1], 16, 16),
        made.stream("a", 0, 16),
        made.stream("b", 0, 16),
        made.stream("a", 16, 16),
    ]
    assert 7 == len({bytes(one) for one in blocks})


def test_made_up_ids_are_in_the_vocabulary_without_special_ids_and_use_all_of_it() -> None:
    ids = Synthesis("salt", 50, [0, 7]).stream("a", 0, 5000)
    assert set(range(50)) - {0, 7} == set(ids)


def test_a_stream_may_be_read_in_parts() -> None:
    made = Synthesis("salt", 500)
    assert made.stream("a", 0, 30) == made.stream("a", 0, 11) + made.stream("a", 11, 19)


def test_a_trace_may_leave_out_the_last_partial_block() -> None:
    made = Synthesis("salt", 500)
    whole = made.blocks("", [1, 2], 16, 40)
    assert 40 == len(whole)
    assert whole[:32] == made.blocks("", [1, 2], 16, 32)


def test_messages_go_on_with_the_live_reply() -> None:
    maker = prompts()
    first, second = (
        row(name, "s", messages=[{"role": "user", "content": name}], message_mode="delta") for name in "ab"
    )
    one = held(first)
    maker.answered(one, make(maker, one), "live reply", [1])
    made = make(maker, held(second, parent="a"))
    assert "chat" == made.route
    assert ["a", "live reply", "b"] == [message["content"] for message in made.body["messages"]]
    assert ["user", "assistant", "user"] == [message["role"] for message in made.body["messages"]]


def test_ids_go_on_with_the_live_ids_for_every_branch() -> None:
    maker = prompts()
    root = held(row("a", "s", token_ids=[10, 11], message_mode="delta"))
    maker.answered(root, make(maker, root), "x", [20, 21])
    for name in ("left", "right"):
        made = make(maker, held(row(name, name, token_ids=[30], message_mode="delta"), parent="a"))
        assert [10, 11, 20, 21, 30] == made.body["prompt"]
        assert 5 == made.prompt_tokens


def test_a_reply_whose_ids_nobody_told_is_counted() -> None:
    maker = prompts()
    root = held(row("a", "s", token_ids=[10, 11], message_mode="delta"))
    maker.answered(root, make(maker, root), "x", None)
    assert [10, 11, 30] == make(maker, held(row("b", "s", token_ids=[30], message_mode="delta"), parent="a")).body[
        "prompt"
    ]
    assert 1 == maker.touched["replies without ids, left out of what follows"]


def test_text_goes_on_with_the_live_text() -> None:
    maker = prompts()
    root = held(row("a", "s", text_input="Once", input_length=None, message_mode="delta"))
    maker.answered(root, make(maker, root), " upon", [20])
    made = make(maker, held(row("b", "s", text_input=" a time", input_length=None, message_mode="delta"), parent="a"))
    assert "Once upon a time" == made.body["prompt"]


def test_a_whole_prompt_and_a_reset_one_have_no_history() -> None:
    maker = prompts()
    root = held(row("a", "s", token_ids=[10]))
    maker.answered(root, make(maker, root), "x", [20])
    for fields in ({"message_mode": "history"}, {"message_mode": "delta", "prefix_reset": True}):
        assert [30] == make(maker, held(row("b", "s", token_ids=[30], **fields), parent="a")).body["prompt"]


def test_a_prefix_keeps_so_many_tokens_and_fills_up_from_what_all_share() -> None:
    maker = prompts()
    root = held(row("a", "s", input_length=5, prefix_length=8, message_mode="delta"))
    first = make(maker, root)
    assert 13 == first.prompt_tokens
    maker.answered(root, first, "x", [20, 21])
    kept = make(maker, held(row("b", "s", input_length=3, prefix_length=10, message_mode="delta"), parent="a"))
    assert first.body["prompt"][:10] == kept.body["prompt"][:10]
    assert 13 == kept.prompt_tokens
    other = make(maker, held(row("c", "t", input_length=5, prefix_length=8, message_mode="delta")))
    assert first.body["prompt"][:8] == other.body["prompt"][:8]
    assert first.body["prompt"][8:] != other.body["prompt"][8:]


def test_after_a_failed_turn_the_conversation_goes_on_from_before_it() -> None:
    maker = prompts()
    root = held(row("a", "s", token_ids=[10], message_mode="delta"))
    maker.answered(root, make(maker, root), "x", [20])
    failed = held(row("b", "s", token_ids=[30], message_mode="delta"), parent="a")
    make(maker, failed)
    maker.passed_over(failed)
    assert [10, 20, 40] == make(maker, held(row("c", "s", token_ids=[40], message_mode="delta"), parent="b")).body[
        "prompt"
    ]


def test_history_that_nobody_knows_is_counted() -> None:
    maker = prompts()
    make(maker, held(row("b", "s", token_ids=[30], message_mode="delta"), parent="gone"))
    assert {"history lost": 1} == dict(maker.touched)


def test_rows_over_a_limit_are_dropped_or_cut_and_counted() -> None:
    long = row("a", token_ids=list(range(10, 20)), output_length=9)
    dropping = prompts(max_prompt=4)
    assert dropping.make(held(long)) is None
    assert {"prompt too long, dropped": 1} == dict(dropping.touched)
    cutting = prompts(max_prompt=4, max_output=3, over="cap")
    made = make(cutting, held(long))
    assert ([10, 11, 12, 13], 3) == (made.body["prompt"], made.body["max_tokens"])
    assert {"prompt cut": 1, "output cut": 1} == dict(cutting.touched)


def test_our_server_gets_our_fields_and_others_only_openais() -> None:
    ours = body(row("a", token_ids=[9], output_length=3))
    assert {"ignore_eos": True, "return_token_ids": True, "cache_salt": "salt"}.items() <= ours.items()
    plain = body(row("a", token_ids=[9], output_length=3), Facts(model="m"))
    assert {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"} == plain.keys()


def test_a_cap_obeys_the_end_of_the_sequence_unless_told_otherwise() -> None:
    capped = row("a", token_ids=[9], output_mode="cap")
    assert "ignore_eos" not in body(capped)
    assert body(capped, output_mode="exact")["ignore_eos"]
    assert "ignore_eos" not in body(row("a", token_ids=[9]), output_mode="cap")


def test_a_row_without_a_length_gets_the_default() -> None:
    assert 128 == body(row("a", token_ids=[9], output_length=None))["max_tokens"]
    assert 5 == body(row("a", token_ids=[9], output_length=None), default_output=5)["max_tokens"]


def test_a_rows_extra_fields_and_those_of_the_run_are_merged() -> None:
    made = body(row("a", token_ids=[9], extra={"max_loops": 2, "top_k": 1}), fields={"top_k": 3})
    assert (2, 3) == (made["max_loops"], made["top_k"])


def test_recorded_depths_are_sent_where_the_server_follows_them() -> None:
    recorded = row("a", token_ids=[9], output_length=4, exit_depths=[4, 2, 1])
    assert "exit_trace" not in body(recorded)
    tracing = Facts(model="m", speaks="epicycle", exit_rule="trace")
    assert ([4, 2, 1], 3) == (body(recorded, tracing)["exit_trace"], body(recorded, tracing)["max_tokens"])
    assert [4, 2, 1] == body(recorded, exit_traces="always")["exit_trace"]
    assert "exit_trace" not in body(recorded, tracing, exit_traces="never")


def test_sessions_are_pinned_on_request() -> None:
    assert "session_id" not in body(row("a", "s", token_ids=[9]))
    assert "s" == body(row("a", "s", token_ids=[9]), pins_sessions=True)["session_id"]


def test_hashes_need_a_vocabulary() -> None:
    with pytest.raises(ReplayError, match="--vocab-size"):
        prompts(Facts(model="m")).make(held(row("a")))


@pytest.mark.parametrize(
    ("card", "speaks"),
    [({"id": "a", "exit_rule": "ouro"}, "epicycle"), ({"id": "a", "owned_by": "vllm"}, "vllm"), ({"id": "a"}, "plain")],
)
def test_what_a_target_speaks_is_guessed_from_its_card(card: dict[str, Any], speaks: str) -> None:
    assert speaks == facts_of(card).speaks
    assert "plain" == facts_of(card, "plain").speaks


def test_a_prompt_beyond_any_context_is_not_made_up() -> None:
    maker = prompts()
    assert maker.make(held(row("a", input_length=1 << 31))) is None
    assert maker.make(held(row("b", input_length=None, hash_ids=list(range(1000)), block_size=65536))) is None
    assert {"prompt over 4194304 tokens, dropped": 2} == dict(maker.touched)


def test_an_answer_is_streamed_whatever_a_row_says() -> None:
    assert body(row("a", token_ids=[9], extra={"stream": False}))["stream"]


def test_what_was_said_is_forgotten_by_bytes_too() -> None:
    maker = prompts()
    maker.histories.most_bytes = 1000
    for number in range(5):
        one = held(row(f"{number}", "s", text_input="x" * 50, input_length=None))
        maker.answered(one, make(maker, one), "y" * 50, None)
    assert [True, True] == [maker.histories.of(f"{number}") is not None for number in (3, 4)]
    assert maker.histories.of("0") is None
