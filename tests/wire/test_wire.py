"""The wire: bytes pinned for every struct, versions that read each other, and nothing but WireError on junk."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epicycle.transport import codec
from epicycle.transport.codec import Decoder, encode
from epicycle.transport.errors import WireError
from epicycle.transport.wire.base import WIRE_VERSION, Wire
from epicycle.transport.wire.client import FromClient, ToClient
from epicycle.transport.wire.columns import F32, I32, I64, U16, U64, pack, unpack, unpack_list
from epicycle.transport.wire.control import FromSupervisor, Stop, ToSupervisor
from epicycle.transport.wire.kv import Census, Snapshot
from epicycle.transport.wire.output import ToGateway
from epicycle.transport.wire.plan import FromExecutor, ToExecutor
from epicycle.transport.wire.request import Cancel, ToControl, Verdict
from epicycle.transport.wire.transfer import Arrived, ToPeer
from tests.wire.golden import breaks, current, read, sample, structs, tagged

UNIONS: dict[str, Any] = {
    "ToControl": ToControl,
    "Verdict": Verdict,
    "ToExecutor": ToExecutor,
    "FromExecutor": FromExecutor,
    "ToGateway": ToGateway,
    "ToSupervisor": ToSupervisor,
    "FromSupervisor": FromSupervisor,
    "FromClient": FromClient,
    "ToClient": ToClient,
    "kv": Snapshot | Census,
    "ToPeer": ToPeer,
    "carried": Arrived,
}
STRUCTS = structs()
TAGGED = tagged()


def required_count(kind: type[Wire]) -> int:
    return len(kind.__struct_fields__) - len(kind.__struct_defaults__)


def frame_of(kind: type[Wire], values: list[Any]) -> bytes:
    return msgspec.msgpack.encode([kind.__struct_config__.tag, *values])


def values_of(message: Wire) -> list[Any]:
    return [getattr(message, name) for name in message.__struct_fields__]


def test_every_struct_has_its_golden_bytes() -> None:
    assert current() == read(), "an append? then run `python -m tests.wire.golden`"


@pytest.mark.parametrize("name", STRUCTS)
def test_golden_bytes_decode_to_the_sample(name: str) -> None:
    frame = bytes.fromhex(read()["structs"][name]["hex"])
    assert sample(STRUCTS[name]) == msgspec.msgpack.decode(frame, type=STRUCTS[name])


def pinned(*fields: str, tag: int = 1) -> dict[str, Any]:
    return {"structs": {"Cancel": {"tag": tag, "fields": list(fields)}}}


def test_only_appends_keep_the_wire_version() -> None:
    old = pinned("rid", "cause")
    assert [] == breaks(old, pinned("rid", "cause", "added"))
    assert ["Cancel"] == breaks(old, pinned("cause", "rid"))
    assert ["Cancel"] == breaks(old, pinned("rid"))
    assert ["Cancel"] == breaks(old, pinned("rid", "cause", tag=2))
    assert ["Cancel"] == breaks(old, {"structs": {}})


def test_tags_are_unique_integers() -> None:
    tags = [kind.__struct_config__.tag for kind in TAGGED.values()]
    assert sorted(set(tags)) == sorted(tags)
    assert all(isinstance(tag, int) for tag in tags)


@pytest.mark.parametrize("name", STRUCTS)
def test_every_struct_follows_the_rules(name: str) -> None:
    config = STRUCTS[name].__struct_config__
    assert (True, True, False, False) == (config.array_like, config.frozen, config.gc, config.forbid_unknown_fields)


def test_every_message_belongs_to_a_conversation() -> None:
    spoken = {member for union in UNIONS.values() for member in getattr(union, "__args__", (union,))}
    assert set(TAGGED.values()) == spoken


@pytest.mark.parametrize("name", TAGGED)
def test_a_message_survives_the_codec(name: str) -> None:
    message = sample(TAGGED[name])
    assert message == Decoder(TAGGED[name])(encode(message))


@pytest.mark.parametrize("name", TAGGED)
def test_an_older_peers_message_gets_the_defaults(name: str) -> None:
    kind = TAGGED[name]
    full = sample(kind)
    for count in range(required_count(kind), len(kind.__struct_fields__)):
        expected = kind(*values_of(full)[:count])
        assert expected == Decoder(kind)(frame_of(kind, values_of(full)[:count]))


@pytest.mark.parametrize("name", TAGGED)
def test_a_newer_peers_fields_are_ignored(name: str) -> None:
    message = sample(TAGGED[name])
    frame = frame_of(TAGGED[name], [*values_of(message), "added", [1, {"a": b"b"}]])
    assert message == Decoder(TAGGED[name])(frame)


@pytest.mark.parametrize("name", [name for name, kind in TAGGED.items() if required_count(kind)])
def test_a_message_without_a_required_field_is_refused(name: str) -> None:
    kind = TAGGED[name]
    with pytest.raises(WireError):
        Decoder(kind)(frame_of(kind, values_of(sample(kind))[: required_count(kind) - 1]))


@pytest.mark.parametrize("union", UNIONS)
def test_unknown_and_foreign_tags_are_refused(union: str) -> None:
    decode: Decoder[Any] = Decoder(UNIONS[union])
    own = set(getattr(UNIONS[union], "__args__", (UNIONS[union],)))
    for foreign in set(TAGGED.values()) - own:
        with pytest.raises(WireError):
            decode(encode(sample(foreign)))
    with pytest.raises(WireError):
        decode(msgspec.msgpack.encode([9999, 1]))


def test_both_ends_refuse_a_frame_over_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = encode(Stop("x" * 100))
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", len(frame))
    assert Stop("x" * 100) == Decoder(Stop)(encode(Stop("x" * 100)))
    with pytest.raises(WireError, match=f"Stop of {len(frame) + 1} bytes is over the frame limit of {len(frame)}"):
        encode(Stop("x" * 101))
    with pytest.raises(WireError, match=f"frame of {len(frame) + 1} bytes is over the limit of {len(frame)}"):
        Decoder(Stop)(frame + b"\x00")


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",  # an array of four billion
        b"\x92\x2f\xc6\xff\xff\xff\xff",  # bytes of four gigabytes
        b"\x92\x2f\xa1\xff",  # a string that isn't UTF-8
        b"\x93\x2f\xa0" + b"\x91" * 100_000,  # nested without end
        b"\x92\x2f\xa0\x00",  # one byte too many
        b"\x80",
        b"\x92\x2f\x01",
    ],
)
def test_hostile_frames_are_wire_errors(frame: bytes) -> None:
    with pytest.raises(WireError):
        Decoder(ToSupervisor | Stop)(frame)


@given(frame=st.binary(max_size=200), union=st.sampled_from(sorted(UNIONS)))
def test_random_bytes_are_a_message_or_a_wire_error(frame: bytes, union: str) -> None:
    decode_or_refuse(frame, union)


@given(data=st.data(), name=st.sampled_from(sorted(TAGGED)), union=st.sampled_from(sorted(UNIONS)))
def test_damaged_messages_are_a_message_or_a_wire_error(data: st.DataObject, name: str, union: str) -> None:
    frame = bytearray(encode(sample(TAGGED[name])))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    del frame[data.draw(st.integers(1, len(frame))) :]
    decode_or_refuse(bytes(frame), union)


def decode_or_refuse(frame: bytes, union: str) -> None:
    decode: Decoder[Any] = Decoder(UNIONS[union])
    try:
        message = decode(frame)
    except WireError:
        return
    assert isinstance(message, UNIONS[union])
    encode(message)


def test_the_golden_file_is_of_this_version() -> None:
    assert WIRE_VERSION == read()["wire_version"]


@pytest.mark.parametrize(
    ("code", "values", "column"),
    [
        (I32, [1, -2], b"\x01\x00\x00\x00\xfe\xff\xff\xff"),
        (I64, [1], b"\x01" + bytes(7)),
        (U64, [(1 << 64) - 1], b"\xff" * 8),
        (U16, [4, 0x0102], b"\x04\x00\x02\x01"),
    ],
)
def test_columns_are_little_endian(code: str, values: list[int], column: bytes) -> None:
    assert column == pack(code, values)
    assert values == unpack_list(code, column)
    assert values == list(unpack(code, column))


def test_a_float_column_keeps_float32() -> None:
    assert [0.5, -1.25] == list(unpack(F32, pack(F32, [0.5, -1.25])))


@pytest.mark.parametrize(("code", "value"), [(I32, 1 << 31), (U16, -1), (U16, 1 << 16), (U64, 1 << 64)])
def test_a_value_outside_its_column_is_refused(code: str, value: int) -> None:
    with pytest.raises(OverflowError):
        pack(code, [value])


def test_a_column_of_a_broken_length_is_refused() -> None:
    with pytest.raises(TypeError):
        unpack(I32, b"\x00" * 5)


def test_a_cancel_is_the_bytes_it_always_was() -> None:
    assert b"\x93\x02\xcd\x01\x00\xa6client" == encode(Cancel(256))
