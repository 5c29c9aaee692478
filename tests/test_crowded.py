"""Tests that are tried again do not make all others wait."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from tests import crowded
from tests.crowded import in_time, send_at_once

PAIRS = 50
DELAYED_S = 0.04
"""Seconds for which Linux holds an acknowledgement back."""


class Configured:
    """What a process beside others has of pytest's configuration."""

    def __init__(self, failures_db: object) -> None:
        self.failures_db = failures_db


def connected(kind: type[Any], server: Any) -> Any:
    """The server's thread listens a moment after it was made."""
    until = time.monotonic() + 10
    while True:
        try:
            return kind(server.sock_port, server.token)
        except ConnectionRefusedError:
            assert time.monotonic() < until, "the server does not listen"
            time.sleep(0.01)


def test_counts_of_second_tries_are_asked_for_without_a_wait() -> None:
    rerunfailures = pytest.importorskip("pytest_rerunfailures")
    server = rerunfailures.ServerStatusDB()
    client = connected(rerunfailures.ClientStatusDB, server)
    send_at_once(Configured(client))
    began = time.monotonic()
    for number in range(PAIRS):
        assert client.get_test_failures(str(number)) == 0
        client.set_test_reruns(str(number), 2)
    assert time.monotonic() - began < PAIRS * DELAYED_S / 2
    assert client.get_test_reruns(str(PAIRS - 1)) == 2
    client.sock.close()


def test_a_process_alone_has_nobody_to_ask() -> None:
    send_at_once(Configured(object()))


def test_this_process_does_not_wait(pytestconfig: pytest.Config) -> None:
    sock = getattr(getattr(pytestconfig, "failures_db", None), "sock", None)
    if sock is None:
        pytest.skip("no other process runs tests")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(("seconds", "busy", "fine"), [(1.9, False, True), (2.0, False, False), (2.1, True, True)])
def test_what_takes_long_is_late_unless_others_want_the_cores(
    monkeypatch: pytest.MonkeyPatch, seconds: float, busy: bool, fine: bool
) -> None:
    monkeypatch.setattr(crowded, "crowded", lambda: busy)
    assert in_time(seconds, 2.0) is fine
