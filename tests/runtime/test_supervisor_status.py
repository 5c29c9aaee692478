"""The writing end of the status pipe."""

from __future__ import annotations

import json
import os

from kvferry.runtime.supervisor_status import SupervisorStatus


def reports(read: int) -> list[dict]:
    return [json.loads(line) for line in os.read(read, 65536).splitlines()]


def test_loading_then_ready_and_small_steps_are_left_out():
    read, write = os.pipe()
    try:
        status = SupervisorStatus.from_fd(write)
        for share in (0.0, 0.004, 0.5, 0.505, 1.2):
            status.loading(share)
        status.ready("http://127.0.0.1:1", device="cpu")
        assert reports(read) == [
            {"status": "loading", "progress": 0.0},
            {"status": "loading", "progress": 0.5},
            {"status": "loading", "progress": 1.0},
            {"status": "ready", "url": "http://127.0.0.1:1", "facts": {"device": "cpu"}},
        ]
        assert not os.get_inheritable(write)
    finally:
        os.close(read)
        os.close(write)


def test_no_descriptor_no_report():
    for fd in (None, -1, 987654):
        status = SupervisorStatus.from_fd(fd)
        status.loading(0.5)
        status.ready("http://127.0.0.1:1")


def test_a_supervisor_that_is_gone_or_slow_is_no_error():
    read, write = os.pipe()
    status = SupervisorStatus.from_fd(write)
    for _ in range(5000):
        status.ready("http://127.0.0.1:1")
    os.close(read)
    status.ready("http://127.0.0.1:1")
    status.ready("http://127.0.0.1:1")
