"""Every trace format: a small file as its internal rows, and the exact line and field of what is wrong in it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from epicycle.tools.replaying.errors import Faults, TraceError
from epicycle.tools.replaying.formats.registry import FORMATS, choose
from epicycle.tools.replaying.source import Source
from epicycle.transport.trace_rows import TraceRow
from tests.fakes.replay import read_all


def jsonl(*records: object) -> str:
    """Lines of JSON; a string stays as it is."""
    return "\n".join(one if isinstance(one, str) else json.dumps(one) for one in records) + "\n"


def lines(*texts: str) -> str:
    return "\n".join(texts) + "\n"


def said(role: str, text: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": text}]


def new(session: str, **fields: Any) -> TraceRow:
    """What a session says next, with a cap on the answer."""
    return TraceRow(session_id=session, message_mode="delta", output_mode="cap", **fields)


BLOCKS = {"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [3, 9]}
ROUND = {"session_id": "s", "input_tokens_total": 100, "output_tokens": 9, "model": "m"}
EVENTS_0 = [
    {"event_type": "user_message", "timestamp": "2026-01-01T00:00:00Z"},
    {"event_type": "text", "timestamp": "2026-01-01T00:00:02Z"},
    {"event_type": "tool_call", "timestamp": "2026-01-01T00:00:03Z"},
]
EVENTS_1 = [
    {"event_type": "tool_result", "timestamp": "2026-01-01T00:00:07.500Z"},
    {"event_type": "text", "timestamp": "2026-01-01T00:00:09Z"},
    {"event_type": "tool_result", "timestamp": "2026-01-01T00:00:10Z"},
]
EVENTS_2 = [{"event_type": "user_message", "timestamp": "2026-01-01T00:01:09Z"}]
TOOL = {"tool_name": "grep", "tool_wall_latency_ms": 4000}
NESTED = [{"t": 0.5, "type": "n", "in": 64, "out": 4, "hash_ids": [9], "api_time": 1.0}]
WEKA = {
    "id": "w",
    "block_size": 64,
    "hash_id_scope": "local",
    "colour": "red",
    "requests": [
        {"t": 0.0, "type": "n", "in": 100, "out": 5, "hash_ids": [1, 2], "api_time": 2.0},
        {"t": 3.0, "type": "subagent", "agent_id": "a", "requests": NESTED, "duration_ms": 2000},
        {"t": 6.0, "type": "s", "in": 150, "out": 6, "hash_ids": [1, 2, 3], "api_time": 1.0},
        {"t": 6.5, "type": "n", "in": 150, "out": 6, "hash_ids": [1, 2, 4], "api_time": 1.0},
    ],
}

# format -> file, rows; the file has blank lines and unknown fields
GOLDEN: dict[str, tuple[str, list[TraceRow]]] = {
    "native": (
        jsonl({"request_id": "a", "input_length": 3, "colour": "red"}, "", {"request_id": "b", "text_input": "x"}),
        [TraceRow(request_id="a", input_length=3), TraceRow(request_id="b", text_input="x")],
    ),
    "mooncake": (
        jsonl(BLOCKS | {"x": 1}, "  ", BLOCKS | {"timestamp": 8.5}),
        [TraceRow(**BLOCKS), TraceRow(**(BLOCKS | {"timestamp": 8.5}))],
    ),
    "aiperf": (
        jsonl(
            {"session_id": "s", "text_input": "hi", "output_length": 4, "colour": 1},
            {"session_id": "s", "text_input": "more", "delay": 20, "extra": {"top_k": 1}},
            "",
            {"messages": said("user", "yo"), "timestamp": 3, "tools": []},
            {"session_id": "s", "messages": said("user", "z"), "message_mode": "delta"},
            {"session_id": "t", "input_length": 9, "timestamp": 4},
        ),
        [
            new("s", messages=said("user", "hi"), output_length=4),
            new("s", messages=said("user", "more"), delay=20.0, extra={"top_k": 1}),
            TraceRow(messages=said("user", "yo"), timestamp=3.0, tools=[], output_mode="cap"),
            new("s", messages=said("user", "z")),
            new("t", input_length=9, timestamp=4.0),
        ],
    ),
    "aiperf-multi-turn": (
        jsonl({"session_id": "s", "x": 1, "turns": [{"text": "a", "timestamp": 1}, {"texts": ["b", "c"], "delay": 2}]}),
        [
            new("s", messages=said("user", "a"), timestamp=1.0),
            new("s", messages=said("user", "b\nc"), delay=2.0),
        ],
    ),
    "bailian": (
        jsonl(
            {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 20, "output_length": 2,
             "hash_ids": [1, 2], "type": "text", "turn": 1},
            {"chat_id": 2, "parent_chat_id": 1, "timestamp": 1.5, "input_length": 40, "output_length": 2,
             "hash_ids": [1, 2, 3]},
            {"chat_id": 9, "parent_chat_id": 4, "timestamp": 2, "input_length": 16, "output_length": 2,
             "hash_ids": [5]},
        ),
        [
            TraceRow(request_id="1", session_id="1", wait_for=[], timestamp=500.0, input_length=20, output_length=2,
                     hash_ids=[1, 2], block_size=16, meta={"type": "text"}),
            TraceRow(request_id="2", session_id="1", wait_for=["1"], timestamp=1500.0, input_length=40,
                     output_length=2, hash_ids=[1, 2, 3], block_size=16),
            TraceRow(request_id="9", session_id="9", wait_for=[], timestamp=2000.0, input_length=16, output_length=2,
                     hash_ids=[5], block_size=16),
        ],
    ),
    "burstgpt": (
        lines(
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type,Session ID",
            "5,ChatGPT,472,18,490,Conversation log,7",
            "",
            "45.5,GPT-4,10,0,10,API log,",
            "118,GPT-4,1087,230,1317,API log,",
        ),
        [
            TraceRow(session_id="7", timestamp=5000.0, input_length=472, output_length=18, meta={"model": "ChatGPT"}),
            TraceRow(timestamp=118_000.0, input_length=1087, output_length=230, meta={"model": "GPT-4"}),
        ],
    ),
    "azure": (
        lines(
            "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\r",
            "2023-11-16 18:15:46.6805900,374,44\r",
            "2024-05-10 00:00:00.5+00:00,396,109\r",
        ),
        [
            TraceRow(timestamp=1700158546680.59, input_length=374, output_length=44),
            TraceRow(timestamp=1715299200500.0, input_length=396, output_length=109),
        ],
    ),
    "sharegpt": (
        json.dumps(
            [
                {"id": "x", "colour": 1, "conversations": [
                    {"from": "system", "value": "be kind"}, {"from": "human", "value": "hi"},
                    {"from": "gpt", "value": "hello there"}, {"from": "human", "value": "bye"},
                    {"from": "human", "value": "now"}, {"from": "gpt", "value": "ok"}, {"from": "human", "value": "?"},
                ]},
                {"id": "y", "conversations": [{"from": "gpt", "value": "I begin"}]},
                {"id": "z", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bcdef"}]},
            ],
            indent=1,
        ),
        [
            TraceRow(session_id="1:x", messages=[*said("system", "be kind"), *said("user", "hi")],
                     message_mode="delta", output_length=3, output_mode="cap"),
            TraceRow(session_id="1:x", messages=[*said("user", "bye"), *said("user", "now")], message_mode="delta",
                     output_length=1, output_mode="cap"),
            TraceRow(session_id="3:z", messages=said("user", "a"), message_mode="delta", output_length=2,
                     output_mode="cap"),
        ],
    ),
    "tracelab": (
        jsonl(
            ROUND | {"round_id": "r0", "round_index": 0, "prefix_tokens": 60, "newly_append_tokens": 40,
                     "timing_events": EVENTS_0, "tools": [TOOL], "colour": 1},
            "",
            ROUND | {"round_id": "r1", "round_index": 1, "prefix_tokens": 100, "input_tokens_total": 120,
                     "timing_events": EVENTS_1},
            ROUND | {"round_id": "r2", "round_index": 2, "prefix_tokens": 0, "timing_events": EVENTS_2},
            ROUND | {"session_id": "t", "round_id": 0, "prefix_tokens": 100, "timing_events": None, "tools": None},
            ROUND | {"session_id": "t", "round_id": 1, "input_tokens_total": 0},
        ),
        [
            TraceRow(request_id="s/0", session_id="s", timestamp=1767225600000.0, input_length=40, prefix_length=60,
                     message_mode="delta", output_length=9, meta={"model": "m"}),
            TraceRow(request_id="s/1", session_id="s", timestamp=1767225607500.0, delay=0.0, tool_wait_ms=4500.0,
                     tool_events=[TOOL], input_length=20, prefix_length=100, message_mode="delta", output_length=9,
                     meta={"model": "m"}),
            TraceRow(request_id="s/2", session_id="s", timestamp=1767225669000.0, delay=60_000.0, input_length=100,
                     prefix_length=0, message_mode="delta", output_length=9, meta={"model": "m"}),
            TraceRow(request_id="t/0", session_id="t", input_length=1, prefix_length=99, message_mode="delta",
                     output_length=9, meta={"model": "m"}),
        ],
    ),
    "weka": (
        json.dumps(WEKA, indent=1),
        [
            TraceRow(request_id="w#0", session_id="w", timestamp=0.0, wait_for=[], input_length=100, output_length=5,
                     hash_ids=[1, 2], block_size=64, hash_scope="w"),
            TraceRow(request_id="w/a#0", session_id="w/a", timestamp=3500.0, wait_for=["w#0"], delay=1500.0,
                     input_length=64, output_length=4, hash_ids=[9], block_size=64, hash_scope="w"),
            TraceRow(request_id="w#2", session_id="w", timestamp=6000.0, wait_for=["w/a#0"], delay=1000.0,
                     input_length=150, output_length=6, hash_ids=[1, 2, 3], block_size=64, hash_scope="w"),
            TraceRow(request_id="w#3", session_id="w", timestamp=6500.0, wait_for=["w/a#0"], delay=1500.0,
                     input_length=150, output_length=6, hash_ids=[1, 2, 4], block_size=64, hash_scope="w"),
        ],
    ),
}  # fmt: skip


def test_every_format_has_a_golden_file() -> None:
    assert FORMATS.keys() == GOLDEN.keys()


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("asked", ["auto", "named"])
def test_a_file_becomes_its_rows_by_its_beginning_or_by_name(name: str, asked: str, tmp_path: Path) -> None:
    content, rows = GOLDEN[name]
    path = tmp_path / "trace"
    path.write_text(content)
    assert name == choose(Source(path)).name
    assert rows == [_plain(found.row) for found in read_all(path, name if asked == "named" else "auto")]


def _plain(row: TraceRow) -> TraceRow:
    """Without what a format's own line adds to the type."""
    return TraceRow(**{name: getattr(row, name) for name in TraceRow.__struct_fields__})


@pytest.mark.parametrize("name", GOLDEN)
def test_compressed_files_give_the_same_rows(name: str, tmp_path: Path) -> None:
    zstd = pytest.importorskip("backports.zstd")
    content = GOLDEN[name][0].encode()
    rows = []
    for number, packed in enumerate((content, gzip.compress(content), zstd.compress(content))):
        path = tmp_path / f"{number}"
        path.write_bytes(packed)
        rows.append(read_all(path))
    assert rows[0] == rows[1] == rows[2]


@pytest.mark.parametrize(
    ("name", "content", "line", "field"),
    [
        ("native", jsonl({"input_length": 1}, "", {"input_length": -4}), 3, "input_length"),
        ("native", jsonl({"schema": "other", "version": 2}), 1, "schema"),
        ("mooncake", jsonl(BLOCKS, {"timestamp": 1, "input_length": 2, "output_length": 3}), 2, ""),
        ("mooncake", jsonl(BLOCKS, BLOCKS | {"hash_ids": [1, True]}), 2, "hash_ids[1]"),
        ("mooncake", jsonl(BLOCKS) + '{"timestamp": NaN, "input_length": 1, "hash_ids": [1]}\n', 2, ""),
        ("aiperf", jsonl({"session_id": "s", "payload": {}}), 1, "payload"),
        ("aiperf", jsonl({"text_input": "a", "messages": said("user", "b")}), 1, "text_input"),
        ("aiperf-multi-turn", jsonl({"turns": [{"text": "b", "delay": 1, "timestamp": 1}]}), 1, "turns[0].delay"),
        ("aiperf-multi-turn", jsonl({"turns": [{"text": "a", "image": "x.png"}]}), 1, "turns[0].image"),
        ("bailian", jsonl(BLOCKS | {"chat_id": 1, "timestamp": -1.0}), 1, "timestamp"),
        ("burstgpt", "Timestamp,Request tokens,Response tokens\n1,2,3\n\nnan,4,5\n", 4, "Timestamp"),
        ("burstgpt", "Timestamp,Request tokens,Response tokens\n1,-2,3\n", 2, "Request tokens"),
        ("burstgpt", "Timestamp,Request tokens,Response tokens\n1,2\n", 2, ""),
        ("burstgpt", "Timestamp,Request tokens,Response tokens\n1,2,99999999999999999999\n", 2, "Response tokens"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,2,3\n", 2, "TIMESTAMP"),
        ("azure", "TIMESTAMP,ContextTokens\nx,2\n", 1, "GeneratedTokens"),
        ("sharegpt", '[{"id": "a", "conversations": []},\n{"id": "b",\n "conversations": 7}]', 2, "conversations"),
        ("sharegpt", '[{"id": "a", "conversations": []},\n{"id": NaN}]', 2, ""),
        ("tracelab", jsonl(ROUND | {"round_index": 0, "prefix_tokens": 101}), 1, "prefix_tokens"),
        ("tracelab", jsonl(ROUND | {"prefix_tokens": 1, "newly_append_tokens": 3}), 1, "newly_append_tokens"),
        ("tracelab", jsonl(ROUND | {"timing_events": [{"timestamp": "noon"}]}), 1, "timing_events[0].timestamp"),
        ("weka", jsonl({"requests": [{"t": -1, "hash_ids": [1]}]}), 1, "requests[0].t"),
        ("weka", jsonl({"requests": []}, {"requests": [{"requests": [{"t": "x"}]}]}), 2, "requests[0].requests"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_line_and_field(
    name: str, content: str, line: int, field: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    with pytest.raises(TraceError, match=f"trace:{line}") as raised:
        read_all(path, name)
    assert (line, field) == (raised.value.line, raised.value.field)


@pytest.mark.parametrize("name", [name for name in GOLDEN if name not in ("sharegpt", "weka")])
def test_bad_rows_can_be_counted_and_left_out(name: str, tmp_path: Path) -> None:
    content, rows = GOLDEN[name]
    head, _, tail = content.partition("\n")
    path = tmp_path / "trace"
    path.write_text(f"{head}\n{{nonsense\n{tail}")
    faults = Faults("skip")
    assert len(rows) == len(read_all(path, faults=faults))
    assert 1 == faults.skipped["bad row"]
    assert ":2" in faults.texts[0]


def test_rows_that_failed_when_they_were_recorded_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(GOLDEN["burstgpt"][0])
    faults = Faults()
    read_all(path, faults=faults)
    assert {"failed in the trace (no response tokens)": 1} == dict(faults.skipped)
    path.write_text(GOLDEN["sharegpt"][0])
    read_all(path, faults=faults)
    assert 1 == faults.skipped["no human turn first"]


def test_published_weka_times_are_absolute_and_raw_ones_relative(tmp_path: Path) -> None:
    raw = json.loads(json.dumps(WEKA))
    published = json.loads(json.dumps(WEKA))
    published["requests"][1]["requests"][0]["t"] = 3.5
    path = tmp_path / "trace"
    path.write_text(jsonl(raw | {"id": "w"}, published | {"id": "w"}))
    rows = [found.row for found in read_all(path)]
    assert rows[:4] == rows[4:]


def test_a_beginning_that_no_format_knows_is_an_error_that_lists_them(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("hello\nworld\n")
    with pytest.raises(TraceError, match=r"hello.*--format.*burstgpt.*weka"):
        read_all(path)
