"""Checks messages from nodes (token frames, prefill answers, errors), so that a bad one ends only its request."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from math import isfinite
from operator import attrgetter
from typing import Any

from kvferry.protocol.errors import KvferryError, from_body
from kvferry.protocol.frames import plain, plain_first
from kvferry.protocol.messages import AttemptFailed, Deviation, FirstToken, Job, Pulse, ShipDone, StepFrame, TokenDelta
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.protocol.wire import WireError, well_typed
from kvferry.protocol.work import Generate

MAX_ID = 2**31 - 1
"""Largest token id or index."""
MAX_RETRY_S = 3600.0
"""Largest accepted Retry-After of a node, in seconds."""
_PLAIN = frozenset((str, bytes, bool, type(None)))
_INT = frozenset((int,))
_COUNTS = attrgetter("prompt_len", "reused_prefill", "reused_decode", "fetched", "computed", "written")
"""Reader of the counts of a `Reuse`."""
REASONS = (None, "stop", "length", "closed")
"""Valid values of a delta's finish_reason."""


def check_frame(frame: Any) -> StepFrame:
    """Return a validated frame of a token stream; raise WireError if it is invalid."""
    if not isinstance(frame, StepFrame) or type(frame.deltas) is not tuple or type(frame.failed) is not tuple:
        raise WireError(f"a {type(frame).__name__} on a token stream")
    if type(frame.number) is not int or frame.number < 0 or not (frame.pulse is None or _is_pulse(frame.pulse)):
        raise WireError("an invalid StepFrame")
    if not plain(frame.deltas):
        for delta in frame.deltas:
            _check_delta(delta)
    text = frame.deviations
    if type(text) is not tuple or (text and not all(isinstance(each, Deviation) and _valid(each) for each in text)):
        raise WireError("an invalid Deviation")
    for failure in frame.failed:
        if not isinstance(failure, AttemptFailed) or not _valid(failure):
            raise WireError("an invalid AttemptFailed")
    return frame


def check_answer(message: Any) -> FirstToken | ShipDone | AttemptFailed:
    """Return a validated message of a prefill's answer; raise WireError if it is invalid."""
    if plain_first(message):
        first: FirstToken = message
        return first
    if isinstance(message, FirstToken):
        _check_delta(message.delta)
        queue_s, compute_s = message.queue_s, message.compute_s
        are_plain = type(queue_s) is float and type(compute_s) is float and isfinite(queue_s) and isfinite(compute_s)
        if are_plain or (well_typed(message) and _valid((queue_s, compute_s))):
            return message
    elif isinstance(message, ShipDone | AttemptFailed) and _valid(message):
        return message
    raise WireError(f"a {type(message).__name__} that is invalid in a prefill's answer")


def refusal_of(status: int, body: bytes, retry_after: str | None) -> KvferryError:
    """Return the error of a node's HTTP answer with an error status; accepts any bytes."""
    text = f"HTTP status {status}"
    try:
        error = from_body(json.loads(body), text)
    except (ValueError, RecursionError):
        error = KvferryError(text)
    with contextlib.suppress(TypeError, ValueError):
        seconds = float(retry_after)  # type: ignore[arg-type]
        error.retry_after = seconds if 0 <= seconds <= MAX_RETRY_S else None
    return error


def suits(delta: TokenDelta, job: Job) -> bool:
    """Return whether a delta can answer this job: at most max_tokens tokens, and the requested extras."""
    work, ends = job.work, delta.finish_reason is not None
    if not isinstance(work, Generate):
        return not delta.token_ids and (delta.vector is not None or not ends) and len(delta.vector or b"") % 4 == 0
    params = work.params
    text = delta.logprobs
    return (
        (bool(delta.token_ids) or ends)
        and delta.index + len(delta.token_ids) <= max(1, params.max_tokens)
        and (text is None or len(text) == len(delta.token_ids))
        and (delta.prompt_logprobs is None or len(delta.prompt_logprobs) == job.prompt_len)
    )


def _check_delta(delta: Any) -> None:
    """Raise WireError if a delta is invalid; called for every delta, most of which carry only tokens."""
    if type(delta) is TokenDelta and type(delta.token_ids) is tuple and type(delta.attempt) is int:
        plain = delta.logprobs is None and delta.prompt_logprobs is None
        if (
            type(delta.request_id) is str
            and type(delta.index) is int
            and 0 <= delta.index <= MAX_ID
            and _are_ids(delta.token_ids)
            and delta.finish_reason in REASONS
            and (delta.stop_token is None or type(delta.stop_token) is int)
            and (plain or _valid(delta))
            and (delta.reuse is None or _is_reuse(delta.reuse))
            and (delta.vector is None or type(delta.vector) is bytes)
        ):
            return
    raise WireError("an invalid TokenDelta")


def _are_ids(tokens: tuple[Any, ...]) -> bool:
    """Return whether all are valid token ids; a generator would cost more than the one token of most deltas."""
    for token in tokens:  # noqa: SIM110
        if type(token) is not int or not 0 <= token <= MAX_ID:
            return False
    return True


def _is_reuse(value: Any) -> bool:
    """Return whether a value is a valid Reuse; one without misses holds only counts."""
    if type(value) is not Reuse:
        return False
    counts = _COUNTS(value)
    is_plain = value.missed == () and _INT.issuperset(map(type, counts)) and min(counts) >= 0 and max(counts) <= MAX_ID
    return is_plain or _valid(value)


def _is_pulse(value: Any) -> bool:
    return isinstance(value, Pulse) and _valid(value)


def _valid(value: Any) -> bool:
    """Return whether all nested fields have their types, and numbers are finite and within bounds."""
    kind = type(value)
    if kind is int:
        return bool(-(2**63) <= value < 2**63)
    if kind in _PLAIN:
        return True
    if kind is float:
        return isfinite(value)
    if kind is tuple:
        return all(map(_valid, value))
    return not is_dataclass(kind) or (well_typed(value) and all(map(_valid, _parts(kind)(value))))


@cache
def _parts(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads all fields of a message type."""
    names = [field.name for field in fields(kind)]
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)
