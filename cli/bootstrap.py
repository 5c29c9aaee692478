"""Process start-up before any large import: sets thread counts and prints configuration mistakes on one line.

Everything that comes from the environment or goes into it passes here or through `cli.options`.
"""

from __future__ import annotations

import os
import sys

from kvferry.runtime.limits import available_cores
from kvferry.runtime.tracing import TRACER, wanted

ERROR_PREFIX = "kvferry: error: "
"""Starts the one line on stderr that explains exit status 2; the supervisor looks for it in its children's output."""


class StartupFailed(Exception):
    """A process that this one started does not run, however often; `exit_status` is what this one ends with."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def worker_threads(requested: int, ranks: int = 1) -> int:
    """`--threads` of one worker; the only place that decides what 0 means.

    Every worker gets all cores: prefill and decode seldom compute at once on a small machine, and idle workers use
    none. Its ranks divide them."""
    return requested or max(1, available_cores() // ranks)


def set_threads(threads: int) -> None:
    """Size the thread pools of torch's libraries. Must run before torch is imported: they read this once.

    Their threads sleep between kernels instead of spinning, unless OMP_WAIT_POLICY already says otherwise: as soon as
    another process wants a core (the other role, the router), spinning threads hold the cores that the thread they wait
    for needs, and kernels become ten to sixty times slower."""
    for name in _THREAD_VARIABLES:
        os.environ[name] = str(threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def set_encoding() -> None:
    """Encode each text on the thread that asks for it.

    The tokenizers' library would hand every one of them, however short, to threads of its own and wait for these: that
    takes half of the time again, and twice the processor's. It looks this up at each call."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def set_up_traces(process: str) -> None:
    """Send this process's traces, named kvferry-`process`, where OpenTelemetry's variables ask for them."""
    if wanted(os.environ):
        TRACER.set_up(f"kvferry-{process}")


def complain(message: str) -> None:
    """Write a user's mistake as one line."""
    print(ERROR_PREFIX + " ".join(message.split()), file=sys.stderr, flush=True)
