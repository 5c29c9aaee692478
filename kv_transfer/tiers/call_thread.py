"""Thread that runs blocking calls in order; it is a daemon, so a call that hangs does not delay the process's exit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

log = logging.getLogger("kvferry.tiers")


class CallThread:
    """Thread with a bounded queue of calls: at most `most` wait or run. Thread-safe.

    ended: called on the thread when it ends."""

    def __init__(self, name: str, most: int, ended: Callable[[], None] = lambda: None) -> None:
        self._room = threading.Semaphore(most)
        self._calls: SimpleQueue[tuple[Callable[[], None], bool]] = SimpleQueue()
        self._closed, self._ended = False, ended
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[[], None]) -> bool:
        """Queue a call; return False, without queueing, if the queue is full or closed."""
        if self._closed or not self._room.acquire(blocking=False):
            return False
        self._calls.put((call, True))
        return True

    def add(self, call: Callable[[], None]) -> None:
        """Queue a call without regard to the bound."""
        self._calls.put((call, False))

    def close(self) -> None:
        """Drop waiting calls, and end the thread after the running one."""
        self._closed = True
        self.add(lambda: None)

    def _run(self) -> None:
        while not self._closed:
            call, counted = self._calls.get()
            if self._closed:
                break
            try:
                call()
            except Exception:
                log.exception("a call on %s failed", threading.current_thread().name)
            finally:
                if counted:
                    self._room.release()
        self._ended()
