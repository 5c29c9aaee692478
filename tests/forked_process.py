"""A child process that a fork server started: what tests use of a Popen."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import IO


class ForkedProcess:
    """What tests use of a Popen."""

    def __init__(self, pid: int, stdout: IO[str] | None = None, stderr: IO[str] | None = None) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        until = time.monotonic() + timeout if timeout is not None else float("inf")
        while (status := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            time.sleep(0.01)
        return status

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return what is left of its output, which must fit into its pipes. Raises subprocess.TimeoutExpired."""
        self.wait(timeout)
        assert self.stdout
        assert self.stderr
        return self.stdout.read(), self.stderr.read()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
