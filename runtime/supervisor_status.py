"""Status reports of a process to its supervisor (`kvferry serve`), as JSON lines on an inherited pipe.

    {"status": "loading", "progress": 0.4}
    {"status": "ready", "url": "http://127.0.0.1:40123", "facts": {"device": "cpu", "link": "127.0.0.1:41"}}

The descriptor is `settings.status_fd`; without one (-1) the process writes no reports.
"""

from __future__ import annotations

import json
import logging
import os

log = logging.getLogger(__name__)


class SupervisorStatus:
    """Writing end of the status pipe. Not thread-safe; a supervisor that has ended or is slow causes no error."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._progress = -1.0

    @classmethod
    def from_fd(cls, fd: int | None) -> SupervisorStatus:
        """Take ownership of the descriptor; None, negative or closed gives an instance that writes nothing.

        Subprocesses do not inherit the descriptor, so the supervisor sees the pipe end when this process ends."""
        if fd is None or fd < 0:
            return cls(None)
        try:
            os.set_inheritable(fd, False)
            os.set_blocking(fd, False)
        except OSError as error:
            log.warning("status descriptor %d is not usable: %s", fd, error)
            return cls(None)
        return cls(fd)

    def loading(self, progress: float) -> None:
        """Report the share of the model that is loaded, 0 to 1. Steps of less than 1 % are not reported."""
        if progress >= 1.0 or progress - self._progress >= 0.01:
            self._progress = progress
            self._write({"status": "loading", "progress": round(min(max(progress, 0.0), 1.0), 3)})

    def ready(self, url: str, **facts: str) -> None:
        """Report that the process serves HTTP at `url`. facts: details to show to a person."""
        self._write({"status": "ready", "url": url, "facts": facts})

    def _write(self, report: dict[str, object]) -> None:
        if self._fd is None:
            return
        try:
            os.write(self._fd, json.dumps(report).encode() + b"\n")
        except BlockingIOError:
            return
        except OSError:
            os.close(self._fd)
            self._fd = None
