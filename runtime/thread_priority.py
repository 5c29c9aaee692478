"""Lower scheduling priority (niceness) for the calling thread, used by background threads."""

from __future__ import annotations

import contextlib
import os
import threading


def lower_priority(steps: int) -> None:
    """Lower the calling thread's priority by `steps` of niceness.

    Ten steps leave it a tenth of a core for which other threads compete. It has no effect on a thread with a core to
    itself, or on systems whose threads have no priority of their own."""
    with contextlib.suppress(AttributeError, OSError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + steps)
