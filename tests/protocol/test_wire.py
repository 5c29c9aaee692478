"""The codec: every message survives the wire, and bytes of another version are refused, never misread."""

from __future__ import annotations

import types
import typing
from dataclasses import fields, is_dataclass, replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.protocol import lease, link_messages, media, messages, stream_messages
from kvferry.protocol.link_messages import CommitAck, Grant
from kvferry.protocol.messages import GenerateRequest, Job, StepFrame, TokenDelta
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.wire import FrameReader, WireError, message, pack, unpack
from kvferry.protocol.work import Generate

SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=8),
    bool: st.booleans(),
    bytes: st.binary(max_size=8),
    type(None): st.none(),
}
MODULES = (messages, link_messages, lease, media, stream_messages)
NAMED = {name: value for module in MODULES for name, value in vars(module).items()}
MESSAGES = [value for value in NAMED.values() if is_dataclass(value) and isinstance(value, type)]


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that a field of this type may hold."""
    if hint in SCALARS:
        return SCALARS[hint]
    if is_dataclass(hint) and isinstance(hint, type):
        hints = typing.get_type_hints(hint)
        return st.builds(hint, **{field.name: values_of(hints[field.name]) for field in fields(hint)})
    args = typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return st.one_of(*map(values_of, args))
    assert typing.get_origin(hint) is tuple, f"{hint}: a wire type must be a scalar, a message or a tuple"
    if args[-1] is Ellipsis:
        return st.lists(values_of(args[0]), max_size=3).map(tuple)
    return st.tuples(*map(values_of, args))


def test_every_message_class_is_covered() -> None:
    assert len(MESSAGES) >= 20
    assert SamplingParams in MESSAGES


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_a_message_survives_the_wire(cls: type) -> None:
    @settings(max_examples=20, deadline=None)
    @given(values_of(cls))
    def round_trip(value: Any) -> None:
        assert unpack(pack(value)) == value

    round_trip()


@settings(max_examples=50, deadline=None)
@given(st.lists(values_of(StepFrame), max_size=4), st.integers(1, 40))
def test_frames_arrive_whole_however_the_stream_is_cut(frames: list[StepFrame], size: int) -> None:
    stream = b"".join(map(pack, frames))
    reader = FrameReader()
    got = [frame for at in range(0, len(stream), size) for frame in reader.feed(stream[at : at + size])]
    assert got == frames


def test_a_reader_is_empty_between_messages_alone() -> None:
    reader, data = FrameReader(), pack(StepFrame())
    assert reader.is_empty
    for _ in range(2):
        assert list(reader.feed(data[:3])) == []
        assert not reader.is_empty
        assert list(reader.feed(data[3:])) == [StepFrame()]
        assert reader.is_empty


def test_nested_tuples_come_back_as_tuples_and_stay_hashable() -> None:
    job = Job("r", 1, (1, 2), 2, Generate(SamplingParams(logit_bias=((3, 0.5),))), "router")
    back = unpack(pack(GenerateRequest(job)))
    assert isinstance(back.job.params.logit_bias[0], tuple)
    assert hash(back) == hash(GenerateRequest(job))


def _encoded(code: int, values: Any) -> bytes:
    return bytes(msgpack.packb(msgpack.ExtType(code, msgpack.packb(values))))


@pytest.mark.parametrize(
    "data",
    [
        _encoded(127, [1]),
        _encoded(36, [1]),
        _encoded(36, [1, False, 0]),
        _encoded(34, 7),
        _encoded(34, "x"),
        _encoded(31, {"transfer": 1, "first_block": 0, "block_count": 1, "nonce": 0}),
        pack(CommitAck(1))[:-1],
        pack(CommitAck(1)) + b"\0",
        b"",
        b"\xc1",
        b"\xa1\xff",
    ],
    ids=["code", "few", "many", "scalar", "string", "map", "short", "long", "empty", "reserved", "utf8"],
)
def test_what_is_no_message_raises_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        unpack(data)


def test_a_missing_field_is_refused_even_where_the_class_has_a_default() -> None:
    assert StepFrame(()) == StepFrame((), (), 0, None, ())
    with pytest.raises(WireError, match="StepFrame has 5 fields"):
        unpack(_encoded(24, [[]]))


def test_deep_nesting_is_an_error_and_not_a_crash() -> None:
    data = pack(CommitAck(1))
    for _ in range(2000):
        data = bytes(msgpack.packb(msgpack.ExtType(34, b"\x91" + data)))
    with pytest.raises(WireError):
        unpack(data)


def test_a_broken_stream_raises_wire_error() -> None:
    reader = FrameReader()
    assert list(reader.feed(pack(StepFrame()))) == [StepFrame()]
    with pytest.raises(WireError, match="broken stream"):
        list(reader.feed(_encoded(127, [])))


def test_only_messages_and_plain_values_can_be_packed() -> None:
    class Strange:
        pass

    assert unpack(pack({"a": [1, b"x", Grant(1, 0, 2, 3)]})) == {"a": [1, b"x", Grant(1, 0, 2, 3)]}
    with pytest.raises(TypeError, match="Strange is not a message"):
        pack([Strange()])


def test_a_number_is_given_once() -> None:
    with pytest.raises(AssertionError):
        message(20)(TokenDelta)


@pytest.mark.parametrize(
    ("field", "value"),
    [("attempt", "1"), ("token_ids", (1, "2")), ("token_ids", 5), ("work", 3), ("namespace", None), ("deadline_s", ())],
)
def test_a_job_with_a_value_of_another_type_is_no_message(field: str, value: Any) -> None:
    job = Job("a", 0, (1, 2), 2, Generate(SamplingParams()), "router", deadline_s=5)
    assert unpack(pack(GenerateRequest(job))).job == job
    with pytest.raises(WireError, match=rf"Job.{field} has the wrong type"):
        unpack(pack(GenerateRequest(replace(job, **{field: value}))))
