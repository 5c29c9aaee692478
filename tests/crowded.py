"""Which failures are tried again. Tests that wait for processes fail now and then where others want the cores too, and
say nothing of the code. Of thousands, one or two wait for something else than they mean and fail in one run of fifty:
a few failures in a run are tried again wherever it runs, and what they said is told. What fails always fails the run,
and so do many that fail now and then."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

BUSY = 0.9
"""A process that never waits gets at least this share of a core where nobody else wants it."""
A_FEW = 4
"""So many failures of one run are tried again though nobody else uses the machine."""
_SPIN = """
import time
began, used = time.monotonic(), time.process_time()
while time.monotonic() - began < 1.0:
    pass
print((time.process_time() - used) / (time.monotonic() - began))
"""


def shares() -> list[float]:
    """What as many spinning processes as there are cores each get of one, for a second."""
    cores = len(os.sched_getaffinity(0))
    spins = [subprocess.Popen([sys.executable, "-c", _SPIN], stdout=subprocess.PIPE, text=True) for _ in range(cores)]
    return [float(spin.communicate(timeout=60)[0]) for spin in spins]


def crowded() -> bool:
    """Somebody else computes now, or more has waited for a core in this minute than our own clusters do."""
    return os.getloadavg()[0] > 2 * len(os.sched_getaffinity(0)) or min(shares()) < BUSY


def in_time(seconds: float, limit_s: float) -> bool:
    """Whether something took less than its limit. Where others want the cores too it may have taken longer: that says
    nothing of the code."""
    return seconds < limit_s or crowded()


class SecondTries:
    """Of one run of the tests."""

    def __init__(self) -> None:
        self._left = A_FEW

    def allowed(self, error: BaseException | None) -> bool:
        """Asked after every test; those that passed have no error."""
        if error is None:
            return False
        if crowded():
            return True
        self._left -= 1
        return self._left >= 0


def send_at_once(config: object) -> None:
    """Send each message of pytest-rerunfailures to its counts when it is written.

    Beside other processes it tells them over TCP of every test, and asks before the next one. Nagle's algorithm would
    hold the question back until the other side has acknowledged the news, 40 ms later: most tests take less."""
    sock = getattr(getattr(config, "failures_db", None), "sock", None)
    if sock is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
