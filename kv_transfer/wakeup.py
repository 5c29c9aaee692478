"""Wake-up, from any thread, of a thread that sleeps in epoll: the link thread."""

from __future__ import annotations

import os
import threading


class Wakeup:
    """Eventfd whose `descriptor` the sleeping thread watches. Thread-safe.

    After `close` nothing is written, because the descriptor's number may belong to another file by then."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._open, self._lock = True, threading.Lock()

    def wake(self) -> None:
        """Wake the thread; do nothing after `close`."""
        with self._lock:
            if self._open:
                os.eventfd_write(self.descriptor, 1)

    def reset(self, events: int) -> bool:
        """Reset the eventfd. Callback for `UcxLoop.watch`."""
        os.eventfd_read(self.descriptor)
        return False

    def close(self) -> None:
        """Close the eventfd."""
        with self._lock:
            self._open = False
            os.close(self.descriptor)
