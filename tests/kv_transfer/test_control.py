"""Control messages are believed only when every field has its type and lies within its bounds."""

from __future__ import annotations

import time
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.control import read
from kv_transfer.tags import MAX_BLOCKS, MAX_NONCE
from protocol.link_messages import Abort, Commit, CommitAck, Grant, GrantRequest, Refusal
from protocol.messages import Job, Reuse, TokenDelta, TokenLogprobs
from protocol.sampling import SamplingParams
from protocol.wire import WireError, pack, unpack
from protocol.work import Embed, Generate

PARAMS = SamplingParams(temperature=1, logit_bias=((3, 1.5), (4, -2)), logprobs=2, stop_token_ids=(1, 2))
JOB = Job("r", 1, (5, 6, 7), 3, Generate(PARAMS), "router", deadline_s=30)
LOGPROBS = TokenLogprobs(1, -0.5, 1, ((1, -0.5), (2, -1.0)))
DELTA = TokenDelta("r", 1, 0, (1,), (LOGPROBS,), "stop", 1, Reuse(3, 1, 0, 0, 2), (None, LOGPROBS))
EITHER = GrantRequest | Grant | Refusal | Commit | CommitAck | Abort
GOOD = [
    GrantRequest(1, 2, "f", JOB),
    Grant(1, 0, 0, 1),
    Grant(1, MAX_BLOCKS - 1, 1, MAX_NONCE),
    Refusal(9, "node_lost", "gone"),
    Commit(1, 2, (-1, (1 << 32) - 1), DELTA),
    Commit(1, 0, (), TokenDelta("r", 1, 0, ())),
    CommitAck(3),
    Abort(3, "because"),
]
BAD = [
    Grant(0, 0, 1, 1),
    Grant(1, -1, 1, 1),
    Grant(1, 0, -1, 1),
    Grant(1, 1, MAX_BLOCKS, 1),
    Grant(1, 0, 1, 0),
    Grant(1, 0, 1, MAX_NONCE + 1),
    Grant(True, 0, 1, 1),
    CommitAck((1,)),
    CommitAck({}),
    Commit(1, 1, (-2,), DELTA),
    Commit(1, 1, (1 << 32,), DELTA),
    Commit(1, MAX_BLOCKS + 1, (), DELTA),
    Commit(1, 1, (1,), replace(DELTA, token_ids=(1.5,))),
    Commit(1, 1, (1,), replace(DELTA, logprobs=(None,))),
    Commit(1, 1, (1,), replace(DELTA, reuse=LOGPROBS)),
    GrantRequest(1, 2, "f", DELTA),
    GrantRequest(1, 2, "f", replace(JOB, token_ids=())),
    GrantRequest(1, 2, "f", replace(JOB, token_ids=(1, "2", 3))),
    GrantRequest(1, 2, "f", replace(JOB, token_ids=(1, 2, 1 << 63))),
    GrantRequest(1, 2, "f", replace(JOB, token_ids=(1, 2, -3))),
    GrantRequest(1, 2, "f", replace(JOB, prompt_len=4)),
    GrantRequest(1, 2, "f", replace(JOB, deadline_s=float("nan"))),
    GrantRequest(1, 2, "f", replace(JOB, deadline_s=float("inf"))),
    GrantRequest(1, 2, "f", replace(JOB, deadline_s=-1)),
    GrantRequest(1, 2, "f", replace(JOB, work=Embed())),
    GrantRequest(1, 2, "f", replace(JOB, work=Generate(replace(PARAMS, logit_bias=((3,),))))),
    Abort(1, 5),
    Refusal(1, b"x", "y"),
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
    with pytest.raises(WireError, match="Grant is no message for this side"):
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
    value, expected = getattr(found, name), getattr(message, name)
    assert isinstance(value, tuple if isinstance(expected, tuple) else type(expected))


def test_checking_a_prompt_of_128k_tokens_takes_less_than_unpacking_it():
    data = pack(GrantRequest(1, 2, "f", replace(JOB, token_ids=tuple(range(131_072)), prompt_len=131_072)))
    assert fastest(lambda: read(data, EITHER)) < 2 * fastest(lambda: unpack(data))


def fastest(call):
    """CPU seconds, the least of a few tries."""
    times = []
    for _ in range(7):
        began = time.thread_time()
        call()
        times.append(time.thread_time() - began)
    return min(times)
