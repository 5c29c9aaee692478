"""Wake-up of a thread that sleeps in epoll."""

from __future__ import annotations

import os
import threading


class Wakeup:
    """An eventfd, `descriptor` of which is watched.

    Once it is closed nobody writes to it: its number may be another's by then. Rings from any thread."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._open, self._lock = True, threading.Lock()

    def ring(self) -> None:
        with self._lock:
            if self._open:
                os.eventfd_write(self.descriptor, 1)

    def heard(self, events: int) -> bool:
        """Do nothing but wake up; a callback for `watch`."""
        os.eventfd_read(self.descriptor)
        return False

    def close(self) -> None:
        with self._lock:
            self._open = False
            os.close(self.descriptor)
