"""Control messages are believed only when every field has its type and lies within its bounds."""

from __future__ import annotations

import random
import sys
from dataclasses import fields, replace
from types import UnionType
from typing import get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kv_transfer.control_validation import read
from kvferry.kv_transfer.tags import MAX_BLOCKS, MAX_NONCE
from kvferry.protocol.link_messages import (
    Abort,
    Commit,
    CommitAck,
    Copy,
    EmbeddingSupply,
    Fetch,
    Grant,
    GrantRequest,
    NoSupply,
    Refusal,
    Supply,
)
from kvferry.protocol.media import MediaItem
from kvferry.protocol.messages import DecodeTarget, Job, TokenDelta, TokenLogprobs
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.wire import WireError, pack
from kvferry.protocol.work import Embed, Generate
from tests.mutations import mutated

PARAMS = SamplingParams(temperature=1, logit_bias=((3, 1.5), (4, -2)), logprobs=2, stop_token_ids=(1, 2))
JOB = Job("r", 1, (5, 6, 7), 3, Generate(PARAMS), "router", deadline_s=30)
COPY = Copy((5, 6, 7), 4)
MEDIA = (MediaItem("image", "hash", 1, 2, b""),)
LOGPROBS = TokenLogprobs(1, -0.5, 1, ((1, -0.5), (2, -1.0)))
DELTA = TokenDelta("r", 1, 0, (1,), (LOGPROBS,), "stop", 1, Reuse(3, 1, 0, 0, 2), (None, LOGPROBS))
FETCH = Fetch(7, DecodeTarget("a", 1, "a:1", "f"), 1, bytes(32), 1.0)
SUPPLY = Supply(7, 2)
EITHER = GrantRequest | Grant | Refusal | Commit | CommitAck | Abort | Fetch | NoSupply
GOOD = [
    GrantRequest(1, 2, "f", JOB),
    GrantRequest(1, 2, "f", COPY),
    GrantRequest(1, 2, "f", SUPPLY),
    GrantRequest(1, 2, "f", EmbeddingSupply(7, 2)),
    GrantRequest(1, 2, "f", replace(JOB, media=MEDIA, rope_offset=-3)),
    GrantRequest(1, 2, "f", replace(COPY, media=MEDIA)),
    FETCH,
    replace(FETCH, hashes=bytes(16 * MAX_BLOCKS)),
    NoSupply(7, "not_found", "gone"),
    Commit(1, 2, (-1, 5), None),
    Grant(1, 0, 0, 1),
    Grant(1, MAX_BLOCKS - 1, 1, MAX_NONCE),
    Refusal(9, "node_lost", "gone"),
    Commit(1, 2, (-1, (1 << 63) - 1), DELTA),
    Commit(1, 0, (), TokenDelta("r", 1, 0, ())),
    CommitAck(3),
    Abort(3, "because"),
]
BAD = [
    GrantRequest(1, 2, "f", replace(JOB, media=MEDIA * 2)),
    GrantRequest(1, 2, "f", replace(JOB, media=MEDIA, rope_offset=1)),
    GrantRequest(1, 2, "f", replace(COPY, media=(replace(MEDIA[0], length=3),))),
    Grant(0, 0, 1, 1),
    Grant(1, -1, 1, 1),
    Grant(1, 0, -1, 1),
    Grant(1, 1, MAX_BLOCKS, 1),
    Grant(1, 0, 1, 0),
    Grant(1, 0, 1, MAX_NONCE + 1),
    Grant(True, 0, 1, 1),
    CommitAck((1,)),  # type: ignore[arg-type]
    CommitAck({}),  # type: ignore[arg-type]
    Commit(1, 1, (-2,), DELTA),
    Commit(1, 1, (-2,), DELTA),
    Commit(1, MAX_BLOCKS + 1, (), DELTA),
    Commit(1, 1, (1,), replace(DELTA, token_ids=(1.5,))),  # type: ignore[arg-type]
    Commit(1, 1, (1,), replace(DELTA, logprobs=(None,))),
    Commit(1, 1, (1,), replace(DELTA, reuse=LOGPROBS)),  # type: ignore[arg-type]
    GrantRequest(1, 2, "f", DELTA),  # type: ignore[arg-type]
    GrantRequest(1, 2, "f", replace(COPY, token_ids=())),
    GrantRequest(1, 2, "f", replace(COPY, token_ids=(1, -2))),
    GrantRequest(1, 2, "f", replace(COPY, token_ids=(1, 1 << 31))),
    GrantRequest(1, 2, "f", replace(COPY, most=0)),
    GrantRequest(1, 2, "f", replace(COPY, most=MAX_BLOCKS + 1)),
    GrantRequest(1, 2, "f", replace(COPY, deadline_s=-1.0)),
    GrantRequest(1, 2, "f", replace(COPY, adapter=None)),
    GrantRequest(1, 2, "f", replace(JOB, token_ids=())),
    GrantRequest(1, 2, "f", replace(JOB, token_ids=(1, "2", 3))),  # type: ignore[arg-type]
    GrantRequest(1, 2, "f", replace(JOB, token_ids=(1, 2, 1 << 63))),
    GrantRequest(1, 2, "f", replace(JOB, token_ids=(1, 2, -3))),
    GrantRequest(1, 2, "f", replace(JOB, prompt_len=4)),
    GrantRequest(1, 2, "f", replace(JOB, deadline_s=float("nan"))),
    GrantRequest(1, 2, "f", replace(JOB, deadline_s=float("inf"))),
    GrantRequest(1, 2, "f", replace(JOB, deadline_s=-1)),
    GrantRequest(1, 2, "f", replace(JOB, work=Embed())),
    GrantRequest(1, 2, "f", replace(JOB, work=Generate(replace(PARAMS, logit_bias=((3,),))))),  # type: ignore[arg-type]
    GrantRequest(1, 2, "f", replace(SUPPLY, fetch=0)),
    GrantRequest(1, 2, "f", EmbeddingSupply(7, 0)),
    GrantRequest(1, 2, "f", replace(SUPPLY, count=0)),
    GrantRequest(1, 2, "f", replace(SUPPLY, count=MAX_BLOCKS + 1)),
    GrantRequest(1, 2, "f", replace(SUPPLY, deadline_s=float("nan"))),
    GrantRequest(1, 2, "f", FETCH),  # type: ignore[arg-type]
    replace(FETCH, transfer=0),
    replace(FETCH, asker=5),  # type: ignore[arg-type]
    replace(FETCH, first=2),
    replace(FETCH, first=-1),
    replace(FETCH, hashes=b""),
    replace(FETCH, hashes=bytes(17)),
    replace(FETCH, hashes=bytes(16 * MAX_BLOCKS + 16)),
    replace(FETCH, hashes="x" * 32),  # type: ignore[arg-type]
    replace(FETCH, deadline_s=float("inf")),
    NoSupply(0, "not_found", "gone"),
    NoSupply(1, "not_found", 5),  # type: ignore[arg-type]
    Abort(1, 5),  # type: ignore[arg-type]
    Refusal(1, b"x", "y"),  # type: ignore[arg-type]
    5,
    [1, 2],
    DELTA,
]


@pytest.mark.parametrize("message", GOOD, ids=repr)
def test_what_nodes_send_is_read(message):
    assert read(pack(message), EITHER) == message


@pytest.mark.parametrize("message", BAD, ids=repr)
def test_other_things_are_refused(message):
    with pytest.raises(WireError):
        read(pack(message), EITHER)


def test_messages_for_the_other_side_are_refused():
    with pytest.raises(WireError, match="Grant is not a message for this side"):
        read(pack(Grant(1, 0, 1, 1)), GrantRequest | Commit)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=6,
)


@given(st.sampled_from(GOOD), st.data())
def test_any_value_in_any_field_is_either_fine_or_refused_as_a_wire_error(message, data):
    name = data.draw(st.sampled_from([field.name for field in fields(message)]))
    changed = replace(message, **{name: data.draw(ANYTHING)})
    try:
        found = read(pack(changed), EITHER)
    except WireError:
        return
    hint = get_type_hints(type(message))[name]
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kinds += (int,) if float in kinds else ()
    assert isinstance(getattr(found, name), tuple(get_origin(kind) or kind for kind in kinds))


def test_checking_a_prompt_of_128k_tokens_takes_no_more_python_than_one_of_three():
    long = replace(JOB, token_ids=tuple(range(131_072)), prompt_len=131_072)
    for some, more in ((JOB, long), (COPY, replace(COPY, token_ids=long.token_ids))):
        few, many = (pack(GrantRequest(1, 2, "f", asked)) for asked in (some, more))
        read(few, EITHER)  # which makes the checks of these types
        assert instructions(lambda data=many: read(data, EITHER)) == instructions(lambda data=few: read(data, EITHER))


def instructions(call):
    """How many the interpreter executes for it."""
    count, before = 0, sys.gettrace()

    def traced(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return traced

    sys.settrace(traced)
    try:
        call()
    finally:
        sys.settrace(before)
    assert count > 100
    return count


@pytest.mark.parametrize("seed", range(3))
def test_damaged_bytes_are_a_message_or_a_wire_error(seed):
    rng = random.Random(seed)
    refused = 0
    for _ in range(600):
        try:
            found = read(mutated(rng.choice(GOOD), rng), EITHER)
        except WireError:
            refused += 1
        else:
            assert read(pack(found), EITHER) == found or found != found
    assert 300 < refused < 600
