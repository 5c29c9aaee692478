"""Process start-up before any large import: thread counts, tracing, and one-line messages for configuration errors.

Only this module and `cli.options` read or write environment variables.
"""

from __future__ import annotations

import os
import sys

from kvferry.runtime.limits import available_cores
from kvferry.runtime.tracing import TRACER, is_requested

ERROR_PREFIX = "kvferry: error: "
"""Prefix of the stderr line that explains exit status 2; the supervisor looks for it in its children's output."""


class StartupFailed(Exception):
    """A child process failed every start; this process ends with `exit_status`."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def worker_threads(requested: int, ranks: int = 1) -> int:
    """Return the compute threads per rank of a worker; 0 requested means all cores, divided by its ranks.

    Every worker gets all cores: prefill and decode seldom compute at once on a small machine, and idle workers use
    none. No other code interprets the 0."""
    return requested or max(1, available_cores() // ranks)


def set_threads(threads: int) -> None:
    """Size the thread pools of torch's libraries. Call it before torch is imported: they read the variables once.

    The threads sleep between kernels instead of spinning, unless OMP_WAIT_POLICY is set. When another process (the
    other role, the router) competes for the cores, spinning threads keep the thread that they wait for from running,
    and kernels become 10 to 60 times slower."""
    for name in _THREAD_VARIABLES:
        os.environ[name] = str(threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def set_encoding() -> None:
    """Make the tokenizers library encode each text on the calling thread.

    Its default passes even short texts to its own threads and waits for them, which takes 1.5 times as long and twice
    the CPU time. The library reads the variable at each call."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def set_up_traces(process: str) -> None:
    """Start tracing as service kvferry-`process` if OpenTelemetry's variables ask for it."""
    if is_requested(os.environ):
        TRACER.set_up(f"kvferry-{process}")


def print_error(message: str) -> None:
    """Write an error message to stderr as one line with ERROR_PREFIX."""
    print(ERROR_PREFIX + " ".join(message.split()), file=sys.stderr, flush=True)
