"""Lower scheduling priority for a process's background threads."""

from __future__ import annotations

import contextlib
import os
import threading


def give_way(steps: int) -> None:
    """Lower the calling thread's priority by so many steps of niceness: on a core that others want, ten are a tenth of
    it. Where it has a core to itself, nothing changes; nor where threads have no priority of their own."""
    with contextlib.suppress(AttributeError, OSError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + steps)
