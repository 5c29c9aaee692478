"""Threads that give way."""

from __future__ import annotations

import os
import threading

from kvferry.runtime.thread_priority import lower_priority


def test_the_calling_thread_alone_gives_way() -> None:
    before, found = os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), []

    def run() -> None:
        lower_priority(3)
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [min(19, before + 3)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_where_threads_have_no_priority_nothing_happens(monkeypatch) -> None:
    def refused(*_: int) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "getpriority", refused)
    lower_priority(3)
