"""Compiled decoding, checking and joining of token deltas: never another result than Python's."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from itertools import accumulate
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.protocol import frames, wire
from kvferry.protocol.messages import AttemptFailed, FirstToken, Pulse, StepFrame, TokenDelta, TokenLogprobs
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.protocol.wire import FrameReader, WireError, code_of, pack, unpack
from kvferry.router.nodes import delta_queue, message_validation

native = pytest.importorskip("kvferry.protocol._native")
CLASSES = (TokenDelta, code_of(TokenDelta), StepFrame, Reuse, code_of(Reuse), FirstToken)
decode, plain, join, decode_first, plain_first = native.functions(*CLASSES)

INTS = st.one_of(st.integers(0, 300), st.integers(-(2**63), 2**64 - 1))
PLAIN = st.builds(
    TokenDelta,
    st.text(max_size=40),
    st.integers(0, 3),
    st.integers(0, 2**31 - 1),
    st.lists(st.integers(0, 2**31 - 1), max_size=20).map(tuple),
    finish_reason=st.sampled_from(message_validation.REASONS),
    stop_token=st.none() | st.integers(0, 2**17),
)
ANY = st.builds(
    TokenDelta,
    st.text(max_size=3),
    INTS | st.booleans(),
    INTS | st.floats(allow_nan=False),
    st.lists(INTS | st.none() | st.booleans(), max_size=3).map(tuple),
    logprobs=st.none() | st.just((TokenLogprobs(1, -0.5, 1),)),
    finish_reason=st.none() | st.sampled_from(["stop", "length", "closed", "lengthy", ""]) | INTS,
    stop_token=st.none() | INTS | st.text(max_size=2),
    reuse=st.none() | st.just(Reuse(16, computed=16)),
    prompt_logprobs=st.none() | st.just((None,)),
    vector=st.none() | st.binary(max_size=4),
)
OTHERS = [
    StepFrame(number=3, pulse=Pulse()),
    StepFrame(failed=(AttemptFailed("r", 0, "code", "message"),), number=3),
    StepFrame((TokenDelta("r", 0, 1, (1,), reuse=Reuse(16, computed=16, missed=(("unknown", 3),))),), number=3),
]


def payload(message: StepFrame | FirstToken) -> bytes:
    return bytes(msgpack.unpackb(pack(message)).data)


def by_python(data: bytes, kind: type = StepFrame) -> Any:
    """What the codec makes of a message's payload, or the error."""
    try:
        return wire._from_ext(code_of(kind), data)
    except (ValueError, WireError) as error:
        return error


def agree(data: bytes) -> StepFrame | None:
    """Decode a payload both ways; what is not left to Python must be the same."""
    made = decode(data)
    if made is not None:
        told = by_python(data)
        assert made == told
        assert repr(made) == repr(told)  # True is not 1
    return made


def agree_first(data: bytes) -> FirstToken | None:
    """As `agree`, for a first token's payload."""
    made = decode_first(data)
    if made is not None:
        assert repr(made) == repr(by_python(data, FirstToken))  # NaN is not NaN
    return made


@settings(max_examples=200, deadline=None)
@given(st.lists(PLAIN, max_size=20), st.integers(0, 2**40))
def test_frames_that_hold_no_more_than_tokens_are_decoded(deltas: list[TokenDelta], number: int) -> None:
    assert agree(payload(StepFrame(tuple(deltas), number=number))) is not None
    assert plain(tuple(deltas))


@settings(max_examples=300, deadline=None)
@given(st.lists(ANY, max_size=4), st.integers(-3, 2**40) | st.none() | st.text(max_size=2))
def test_other_frames_are_left_to_python_or_are_the_same(deltas: list[TokenDelta], number: Any) -> None:
    agree(payload(StepFrame(tuple(deltas), number=number)))


@pytest.mark.parametrize("frame", OTHERS)
def test_a_frame_with_more_than_tokens_goes_the_usual_way(frame: StepFrame) -> None:
    assert decode(payload(frame)) is None
    assert unpack(pack(frame)) == frame
    assert [*FrameReader().feed(pack(frame))] == [frame]


@settings(max_examples=500, deadline=None)
@given(st.lists(PLAIN, min_size=1, max_size=3), st.data())
def test_damaged_frames_are_left_to_python_or_are_the_same(deltas: list[TokenDelta], data: st.DataObject) -> None:
    damaged = bytearray(payload(StepFrame(tuple(deltas), number=7)))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    agree(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))
    agree(bytes(damaged))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x95\x93",
        b"\x95\xdd\xff\xff\xff\xff",
        b"\x95\x91\xc9\xff\xff\xff\xff\x14",
        payload(StepFrame(number=1)) + b"\xc0",
        b"\x95\x91\xd4\x14\x9a\x90\x01\xc0\x90",
    ],
)
def test_cut_off_and_overlong_frames_are_left_to_python(data: bytes) -> None:
    assert decode(data) is None


def test_only_bytes_are_decoded() -> None:
    assert decode(bytearray(payload(StepFrame()))) is None
    assert plain([]) is False
    assert join(()) is None


COUNTS = st.integers(0, 2**31 - 1)
REUSES = st.builds(Reuse, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, st.just(()), COUNTS)
ODD_REUSES = st.builds(
    Reuse, INTS, INTS, INTS, INTS, INTS | st.booleans(), st.just(()) | st.just((("unknown", 3),)), INTS | st.none()
)
ANY_FIRST = st.builds(
    FirstToken,
    st.builds(replace, ANY | PLAIN, reuse=st.none() | REUSES | ODD_REUSES),
    st.floats() | INTS,
    st.floats() | st.none(),
)


@settings(max_examples=200, deadline=None)
@given(PLAIN, st.none() | REUSES, st.floats(allow_nan=False, allow_infinity=False))
def test_first_tokens_are_decoded_and_pass(delta: TokenDelta, reuse: Reuse | None, queue_s: float) -> None:
    first = FirstToken(replace(delta, reuse=reuse), queue_s, 0.25)
    made = agree_first(payload(first))
    assert made == first == unpack(pack(first))
    assert plain_first(made)
    assert agree(payload(StepFrame((first.delta,), number=1))) is not None


@settings(max_examples=500, deadline=None)
@given(ANY_FIRST)
def test_a_first_token_that_passes_is_one_that_python_passes(first: FirstToken) -> None:
    agree_first(payload(first))
    if plain_first(first):
        message_validation._check_delta(first.delta)
        assert message_validation._valid((first.queue_s, first.compute_s))


@settings(max_examples=500, deadline=None)
@given(PLAIN, st.none() | REUSES, st.data())
def test_damaged_first_tokens_are_left_to_python_or_are_the_same(
    delta: TokenDelta, reuse: Reuse | None, data: st.DataObject
) -> None:
    damaged = bytearray(payload(FirstToken(replace(delta, reuse=reuse), 0.5, 0.25)))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    agree_first(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))
    agree_first(bytes(damaged))


def test_what_is_no_first_token_does_not_pass() -> None:
    incomplete = FirstToken(TokenDelta("r", 0, 1, (1,)), 0.0, 0.0)
    object.__delattr__(incomplete, "queue_s")
    for message in (None, incomplete, TokenDelta("r", 0, 1, (1,)), FirstToken(None, 0.0, 0.0)):  # type: ignore[arg-type]
        assert not plain_first(message)
    assert decode_first(bytearray(payload(FirstToken(TokenDelta("r", 0, 1, (1,)), 0.0, 0.0)))) is None


def is_valid(delta: Any) -> bool:
    try:
        message_validation._check_delta(delta)
    except WireError:
        return False
    return True


@settings(max_examples=500, deadline=None)
@given(ANY | PLAIN)
def test_a_delta_that_passes_is_one_that_python_passes(delta: TokenDelta) -> None:
    holds_more = not (delta.logprobs is delta.prompt_logprobs is delta.reuse is delta.vector is None)
    assert plain((delta,)) == (is_valid(delta) and not holds_more)


class Odd(TokenDelta):
    """A delta of a class of its own."""


@pytest.mark.parametrize(
    "delta",
    [None, "x", Odd("r", 0, 1, (1,)), TokenDelta("r", 0, 1, [1]), TokenDelta("r", True, 1, (1,))],  # type: ignore[arg-type]
)
def test_what_is_no_delta_does_not_pass(delta: Any) -> None:
    assert not plain((delta,))
    assert join([delta]) is None


def test_a_delta_without_a_field_does_not_pass() -> None:
    delta = TokenDelta("r", 0, 1, (1,))
    del delta.token_ids
    assert not plain((delta,))
    assert join([delta]) is None


@settings(max_examples=300, deadline=None)
@given(st.lists(PLAIN, min_size=1, max_size=6), st.booleans(), st.data())
def test_joined_deltas_are_those_that_python_joins(some: list[TokenDelta], consecutive: bool, data: Any) -> None:
    if consecutive:
        places = accumulate((len(each.token_ids) for each in some), initial=5)
        some = [replace(each, request_id="r", attempt=1, index=at) for each, at in zip(some, places, strict=False)]
        some = [replace(each, finish_reason=None) for each in some[:-1]] + some[-1:]
    one, usual = join(some), delta_queue.joined_by_python(some)
    assert ([one] if one is not None else some) == list(usual)
    assert (one is not None) or not consecutive


def test_nothing_is_leaked() -> None:
    # 30 deltas: CPython 3.11 keeps up to 2,000 tuples of exactly 20 items and does not use them again.
    frame = StepFrame(tuple(TokenDelta(f"r{i}", 0, 70000 + i, (70000 + i,)) for i in range(30)), number=70000)
    whole = payload(frame)
    broken = [whole[:at] for at in range(0, len(whole), 7)]
    consecutive = [TokenDelta("r", 0, i, (70000 + i,)) for i in range(30)]
    first = payload(FirstToken(TokenDelta("r", 0, 70000, (70000,), reuse=Reuse(70000, computed=70000)), 0.5, 0.25))
    firsts = [first[:at] for at in range(len(first) + 1)]

    def all_of_it(times: int) -> None:
        for _ in range(times):
            for data in (whole, *broken):
                decode(data)
            for data in firsts:
                plain_first(decode_first(data))
            plain(frame.deltas)
            join(consecutive)
            native.functions(*CLASSES)

    tracemalloc.start()
    try:
        all_of_it(20)  # fills the interpreter's free lists
        grown = []
        while not grown or (min(grown) >= 5000 and len(grown) < 10):  # earlier tests' threads may allocate meanwhile
            before = tracemalloc.get_traced_memory()[0]
            all_of_it(200)
            grown.append(tracemalloc.get_traced_memory()[0] - before)
        assert min(grown) < 5000
    finally:
        tracemalloc.stop()


def test_a_class_without_slots_is_refused() -> None:
    with pytest.raises((TypeError, AttributeError)):
        native.functions(TokenDelta, 20, object, *CLASSES[3:])
    with pytest.raises((TypeError, AttributeError)):
        native.functions(*CLASSES[:5], object)
    with pytest.raises(TypeError):
        native.functions("TokenDelta", 20, *CLASSES[2:])


@pytest.mark.parametrize(("pure", "told"), [("", "True"), ("1", "False")])
def test_the_extension_is_used_unless_it_is_unwanted(pure: str, told: str) -> None:
    code = "from kvferry.protocol.frames import IS_COMPILED; print(IS_COMPILED)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "KVFERRY_PURE": pure},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == told


def test_without_the_extension_all_is_left_to_python() -> None:
    assert frames._left_to_python(()) is None
