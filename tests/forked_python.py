"""Processes of Python that start at once: forks of one that has imported what they need, which takes each of them a
second or three. What a process does after its imports is its own: arguments, environment, descriptors and signals."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.chaos.zygote import IMPORT_S, LIBC, PR_SET_PDEATHSIG, adopt_orphans, fork_for_requests
from tests.forked_cluster import TITLE_BYTES, show
from tests.forked_process import ForkedProcess

ROOT = Path(__file__).parents[1]
ROUTERS = ("kvferry.cli.main", "kvferry.router.main", "kvferry.engine_adapter.main", "openai", "uvloop")
"""What routers and adapters import, and the servers that stand in for engines."""
WORKERS = (
    "kvferry.decode_worker.service",
    "kvferry.engine.ranks.device_group",
    "kvferry.engine.ranks.rank_worker",
    "kvferry.worker.model_loading",
    "kvferry.worker.serve",
)
"""What nodes and their ranks import, PyTorch too."""
_ADOPTING = threading.Lock()
"""Threads start processes, too: one that ceased to adopt would leave another's to init."""
SPARE = 400
"""Descriptors from here on are free for the moment in which a fork puts its own in place."""


class ForkedPython:
    """The process that is forked. Its forks become children of this one."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
        argv = [sys.executable, "-m", "tests.forked_python", str(theirs.fileno()), *modules, " " * TITLE_BYTES]
        self._process = subprocess.Popen(argv, pass_fds=(theirs.fileno(),), env=env)  # ends with the socket
        theirs.close()
        self._socket.settimeout(IMPORT_S)
        assert self._socket.recv(16) == b"imported", "the process to fork from did not start"

    def start(
        self,
        words: Sequence[str],
        stdout: int,
        stderr: int,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> ForkedProcess:
        """Run what `python WORDS` runs: a script, or -m and a module, and arguments. The descriptors in `pass_fds` keep
        their numbers, and all others but stdout and stderr are closed."""
        asked = {
            "words": list(words),
            "env": dict(os.environ if env is None else env),
            "parent": os.getpid(),
            "numbers": list(pass_fds),
        }
        with _ADOPTING:
            before = adopt_orphans(True)
            socket.send_fds(self._socket, [json.dumps(asked).encode()], [stdout, stderr, *pass_fds])
            pid = int(self._socket.recv(16))  # it is adopted by then
            adopt_orphans(before)
        return ForkedProcess(pid)

    def piped(self, words: Sequence[str], env: Mapping[str, str] | None = None) -> ForkedProcess:
        """The same, with text pipes from its stdout and stderr."""
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        process = self.start(words, out_end, err_end, env)
        os.close(out_end)
        os.close(err_end)
        return ForkedProcess(process.pid, os.fdopen(out), os.fdopen(err))


@functools.cache
def forked_python(modules: tuple[str, ...]) -> ForkedPython:
    """The one of this process that has these modules, started when it is first needed."""
    return ForkedPython(modules)


def _live(asked: dict[str, Any], *given: int) -> None:
    """In the new process; does not return."""
    while os.getppid() != asked["parent"]:
        time.sleep(0.001)
    LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    os.setpgid(0, 0)
    _keep([os.open(os.devnull, os.O_RDONLY), *given], [0, 1, 2, *asked["numbers"]])
    os.environ.clear()
    os.environ.update(asked["env"])
    show([sys.executable, *asked["words"]], b"python")
    os._exit(_run(asked["words"]))


def _keep(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Leave these descriptors alone open, under these numbers."""
    aside = [fcntl.fcntl(each, fcntl.F_DUPFD, SPARE) for each in descriptors]
    for each, number in zip(aside, numbers, strict=True):
        os.dup2(each, number)
    for number in {int(name) for name in os.listdir("/proc/self/fd")} - set(numbers):
        with contextlib.suppress(OSError):  # the one that listed them is closed
            os.close(number)


def _run(words: Sequence[str]) -> int:
    """Return the exit status of `python WORDS`."""
    is_module = words[0] == "-m"
    sys.argv = list(words[is_module:])
    try:
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    for module in sys.argv[2:-1]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    fork_for_requests(int(sys.argv[1]), _live)
