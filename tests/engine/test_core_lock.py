"""Cores that processes share: one has them at a time, in order of arrival, and nobody waits for the dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO

import pytest

from kvferry.engine.shared_cores import core_lock
from kvferry.engine.shared_cores.core_lock import CoreLock
from tests.waiting import wait_for

LONG_S = 30.0

OTHER = """
import sys, time
from kvferry.engine.shared_cores.core_lock import CoreLock
cores = CoreLock(int(sys.argv[1]))
for line in sys.stdin:
    word, *seconds = line.split()
    if word == "take":
        print("taken" if cores.acquire(float(seconds[0])) else "not taken", flush=True)
    elif word == "hurry":
        cores.mark_urgent()
        print("told", flush=True)
    elif word == "leave":
        cores.release()
        print("left", flush=True)
"""


class Process:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def say(self, words: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()

    def heard(self) -> str:
        stream: IO[str] | None = self.process.stdout
        assert stream
        return stream.readline().strip()

    def ask(self, words: str) -> str:
        self.say(words)
        return self.heard()


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = core_lock.make()
    assert made >= 0
    yield made
    os.close(made)


@pytest.fixture
def own(descriptor: int) -> CoreLock:
    return CoreLock(descriptor)


@contextmanager
def started(descriptor: int) -> Iterator[Process]:
    argv = (sys.executable, "-c", OTHER, str(descriptor))
    with subprocess.Popen(
        argv, pass_fds=(descriptor,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Process(process)
        finally:
            process.kill()


@pytest.fixture
def other(descriptor: int) -> Iterator[Process]:
    with started(descriptor) as process:
        yield process


def test_one_has_them_at_a_time(own: CoreLock, other: Process) -> None:
    assert other.ask(f"take {LONG_S}") == "taken"
    assert not own.acquire(0.05)
    assert other.ask("leave") == "left"
    assert own.acquire(LONG_S)
    assert other.ask("take 0.05") == "not taken"
    own.release()


def test_who_waits_is_seen_and_comes_before_who_just_had_them(own: CoreLock, other: Process) -> None:
    assert own.acquire(LONG_S)
    assert not own.contended()
    for _ in range(20):
        other.say(f"take {LONG_S}")
        wait_for(own.contended)
        own.release()
        again = threading.Event()
        asked = threading.Thread(target=lambda done=again: (own.acquire(LONG_S), own.release(), done.set()))
        asked.start()
        assert other.heard() == "taken"
        assert not again.is_set()
        other.ask("leave")
        asked.join(LONG_S)
        assert again.is_set()
        assert own.acquire(LONG_S)
    own.release()


def test_three_take_turns(own: CoreLock, descriptor: int) -> None:
    """Anyone who has just had them is the last in the queue."""
    with ExitStack() as stack:
        first, second = (stack.enter_context(started(descriptor)) for _ in range(2))
        assert own.acquire(LONG_S)
        first.say(f"take {LONG_S}")
        wait_for(own.contended)
        second.say(f"take {LONG_S}")
        own.release()
        assert first.heard() == "taken"
        first.say("leave")
        assert first.heard() == "left"
        assert second.heard() == "taken"


def test_who_has_them_hears_that_something_is_urgent(own: CoreLock, other: Process) -> None:
    assert own.acquire(LONG_S)
    other.ask("hurry")
    assert not own.is_urgent(), "but nobody waits"
    other.say(f"take {LONG_S}")
    wait_for(own.is_urgent)
    own.clear_urgent()
    assert own.contended()
    assert not own.is_urgent()
    own.release()
    assert other.heard() == "taken"


def test_what_was_urgent_is_soon_forgotten(own: CoreLock, other: Process) -> None:
    assert own.acquire(LONG_S)
    other.say(f"take {LONG_S}")
    wait_for(own.contended)
    own.mark_urgent()
    assert own.is_urgent()
    time.sleep(0.3)
    assert not own.is_urgent()
    own.release()
    assert other.heard() == "taken"


def test_those_of_a_process_that_dies_are_free(own: CoreLock, other: Process) -> None:
    assert other.ask(f"take {LONG_S}") == "taken"
    other.process.kill()
    assert own.acquire(LONG_S)
    own.release()
    assert own.acquire(LONG_S), "and stay usable"
    own.release()


def test_who_dies_while_it_waits_is_not_waited_for(own: CoreLock, other: Process) -> None:
    assert own.acquire(LONG_S)
    other.say(f"take {LONG_S}")
    wait_for(own.contended)
    other.process.kill()
    other.process.wait()
    assert not own.contended()
    own.release()
    assert own.acquire(LONG_S)
    own.release()


def test_a_process_that_is_stopped_costs_no_more_than_patience(own: CoreLock, other: Process) -> None:
    assert other.ask(f"take {LONG_S}") == "taken"
    other.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert not own.acquire(0.1)
    assert time.monotonic() - began < LONG_S / 2
    other.process.send_signal(signal.SIGCONT)
    assert other.ask("leave") == "left"
    assert own.acquire(LONG_S)
    own.release()


def test_a_platform_without_such_mutexes_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert core_lock.make() == -1
