"""The error tree: one code per class, and an error that crosses the wire arrives as itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.protocol import errors
from kvferry.protocol.errors import (
    ConfigError,
    DeadlineExceeded,
    FatalRequest,
    GrammarFailed,
    InvalidRequest,
    KvferryError,
    ModelFailed,
    NodeDown,
    Overloaded,
    ReplayDiffers,
    Retryable,
    RoleChangeRefused,
    from_body,
)


def _classes(cls: type[KvferryError] = KvferryError) -> Iterator[type[KvferryError]]:
    if cls.__module__ == errors.__name__:
        yield cls
    for sub in cls.__subclasses__():
        yield from _classes(sub)


CLASSES = list(_classes())


SENT = [cls for cls in CLASSES if "code" in vars(cls)]
"""A class without a code of its own is its parent on the wire."""


def test_codes_are_unique() -> None:
    assert set(CLASSES) - set(SENT) == {NodeDown}
    codes = [cls.code for cls in SENT]
    assert sorted(set(codes)) == sorted(codes)


@pytest.mark.parametrize("cls", SENT, ids=lambda cls: cls.__name__)
def test_an_error_arrives_as_the_class_that_was_sent(cls: type[KvferryError]) -> None:
    back = from_body(cls("why", param="field").body())
    assert type(back) is cls
    assert (back.message, back.param, back.retryable) == ("why", "field", cls.retryable)


def test_what_another_attempt_cannot_help() -> None:
    hopeless = {cls for cls in CLASSES if not cls.retryable}
    of_a_process = {ConfigError, RoleChangeRefused, DeadlineExceeded}
    of_a_request = {ModelFailed, GrammarFailed, ReplayDiffers, FatalRequest}
    assert hopeless == of_a_process | of_a_request | {cls for cls in CLASSES if issubclass(cls, InvalidRequest)}


def test_the_tree_in_the_docstring_is_the_tree_in_the_code() -> None:
    assert errors.__doc__
    drawn = dict(re.findall(r"[├└]─ (\w+) +(\d{3}) ", errors.__doc__))
    assert {name: int(status) for name, status in drawn.items()} == {
        cls.__name__: cls.status for cls in CLASSES if cls.__name__ in drawn
    }
    assert {cls.__name__ for cls in CLASSES} - {"KvferryError", "ConfigError"} == set(drawn)


def test_statuses_fit_their_branch() -> None:
    assert all(400 <= cls.status < 500 for cls in CLASSES if issubclass(cls, InvalidRequest))
    assert all(cls.status in (429, 503) for cls in CLASSES if issubclass(cls, Retryable))
    assert Overloaded("busy", retry_after=2.0).retry_after == 2.0


@pytest.mark.parametrize("body", [None, "x", [], {}, {"error": None}, {"error": "text"}, {"detail": "not ours"}])
def test_a_foreign_body_becomes_a_plain_error(body: Any) -> None:
    error = from_body(body, "fallback")
    assert type(error) is KvferryError
    assert error.message == "fallback"


def test_an_unknown_code_keeps_its_message() -> None:
    error = from_body({"error": {"code": "from_the_future", "message": "hello"}})
    assert type(error) is KvferryError
    assert error.message == "hello"


def test_a_message_that_quotes_a_client_is_cut() -> None:
    message = InvalidRequest("no role " + "x" * 100_000).body()["error"]["message"]
    assert message.startswith("no role xxx")
    assert message.endswith("…")
    assert len(message) == 2000
