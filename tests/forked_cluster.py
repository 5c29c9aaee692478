"""Clusters that start in a second: `kvferry serve` and its processes are forked from a process that has imported what
they need. Importing PyTorch takes each of them longer than all else at its start.

What a process does after its imports is its own: command line, environment, descriptors, limits, threads and signals.
Its parent is the same as ever. `local_cluster(forked=False)` starts every process as users do."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.zygote import IMPORT_S, IMPORTED, LIBC, PR_SET_PDEATHSIG, Forked, adopt_orphans, fork_for_requests
from tests.forked_process import ForkedProcess
from tests.paced_steps import pace_steps

ROOT = Path(__file__).parents[1]
PR_SET_NAME = 15
TITLE_BYTES = 8192
"""Room for the command line that a forked process shows in `ps`."""


class ForkServer:
    """The process that is forked. Its forks become children of this one, which adopts no other orphans: a process that
    nobody waits for would seem to run for ever."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
        argv = [sys.executable, "-m", "tests.forked_cluster", str(theirs.fileno()), " " * TITLE_BYTES]
        self._process = subprocess.Popen(argv, pass_fds=(theirs.fileno(),), env=env)  # ends with the socket
        theirs.close()
        self._socket.settimeout(IMPORT_S)
        assert self._socket.recv(16) == b"imported", "the process to fork from did not start"

    def serve(
        self, words: Sequence[str], env: dict[str, str], step_s: float = 0.0, token_s: float = 0.0
    ) -> ForkedProcess:
        """Run `kvferry serve` with these words, and engine steps at this pace (paced_steps)."""
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        asked = {"words": words, "env": env, "parent": os.getpid(), "pace": (step_s, token_s)}
        before = adopt_orphans(True)
        socket.send_fds(self._socket, [json.dumps(asked).encode()], [out_end, err_end])
        pid = int(self._socket.recv(16))  # it is adopted by then
        adopt_orphans(before)
        os.close(out_end)
        os.close(err_end)
        return ForkedProcess(pid, os.fdopen(out), os.fdopen(err))


@functools.cache
def fork_server() -> ForkServer:
    """The one of this process, started when it is first needed."""
    return ForkServer()


def wait_for_work(descriptor: int) -> None:
    """In the process that is forked: import, then fork for every request. Ends with the other side."""
    import torch

    for name in IMPORTED:
        if name != "ucxx":  # it reads its environment when it is loaded
            importlib.import_module(name)
    cli = importlib.import_module("kvferry.cli.main")
    sized = cli.set_threads
    cli.set_threads = lambda threads: (sized(threads), torch.set_num_threads(threads))  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()
    fork_for_requests(descriptor, _serve)


def _serve(asked: dict[str, Any], stdout: int, stderr: int) -> None:
    """In the process of `kvferry serve`; does not return."""
    while os.getppid() != asked["parent"]:
        time.sleep(0.001)
    LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    os.setsid()
    from kvferry.cli.child import Child

    kept = frozenset(int(name) for name in os.listdir("/proc/self/fd")) - {stdout, stderr}
    real = Child._spawn
    Child._spawn = lambda child: _spawn(child, kept, real)  # type: ignore[method-assign, assignment, return-value]
    pace_steps(*asked["pace"])
    _run(["kvferry", *asked["words"]], asked["env"], stdout, stderr)


def _spawn(child: Any, kept: frozenset[int], real: Any) -> Any:
    """In the place of `Child._spawn`: kvferry's own commands are forks of the supervisor; all others start as ever."""
    from kvferry.cli.child_commands import kvferry_program

    program = kvferry_program("")[:-1]
    if list(child.command.argv[: len(program)]) != program:
        return real(child)
    (out, out_end), (reports, reports_end) = os.pipe(), os.pipe()
    env, parent = child._environment(reports_end), os.getpid()
    pid = os.fork()
    if not pid:
        _enter(parent, child.command, kept | {out_end, reports_end, *child.command.fds})
        _run([*program, *child.command.argv[len(program) :]], env, out_end, out_end)
    os.close(out_end)
    os.close(reports_end)
    return Forked(pid), os.fdopen(out, "rb", buffering=0), os.fdopen(reports, "rb", buffering=0)


def _enter(parent: int, command: Any, kept: frozenset[int]) -> None:
    """Leave nothing of the supervisor in this fork of it: loop, signal handlers, descriptors."""
    from kvferry.cli import child

    asyncio._set_running_loop(None)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    child._prepare(parent, command)
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
        with contextlib.suppress(OSError):  # the one that listed them is closed
            os.close(descriptor)


def _run(argv: list[str], env: dict[str, str], stdout: int, stderr: int) -> None:
    """Run a command line of kvferry in this process; does not return."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.environ.clear()
    os.environ.update(env)
    show(argv)
    sys.argv = ["kvferry", *argv[argv.index("-m") + 2 if "-m" in argv[:3] else 1 :]]
    try:
        importlib.import_module("kvferry.cli.main").main()
    finally:
        os._exit(4)


def show(argv: Sequence[str], name: bytes = b"kvferry") -> None:
    """Show this command line in /proc, where an exec would put it. name: of the process."""
    LIBC.prctl(PR_SET_NAME, name, 0, 0, 0)
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(after_name[45]), int(after_name[46])
    text = b"\0".join(word.encode() for word in argv)
    assert len(text) < end - begin, "the command line is longer than TITLE_BYTES"
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, text, len(text))


if __name__ == "__main__":
    wait_for_work(int(sys.argv[1]))
