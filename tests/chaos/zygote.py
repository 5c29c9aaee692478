"""Processes that start at once: forked from one that has imported what they need.

Where a cluster of six shares two cores with its load, a restart that imports torch anew takes the cores from everybody
for half a minute, as no restart on a machine of its own would. What a process does after its imports is all its own.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import IO, Any

from kvferry.cli.child import Child, Command

TESTS = Path(__file__).parents[1]
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER, CLONE_NEWNET = 1, 36, 37, 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)
IMPORT_S = 120.0
MOST_FDS = 32
"""Most descriptors that a request hands over."""
IMPORTED = (
    "kvferry.cli.main",
    "kvferry.router.main",
    "kvferry.worker.serve",
    "kvferry.encode_worker.service",
    "kvferry.elastic_worker.service",
    "kvferry.engine_adapter.main",
    "kvferry.engine.models.hf",
    "ucxx",
    "uvloop",
)


def adopt_orphans(adopt: bool) -> bool:
    """Whether orphans among what this process started become its children, and no longer init's; returns what was."""
    before = ctypes.c_int()
    LIBC.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)
    return bool(before.value)


class Zygote:
    """The one that is forked. Its forks become children of this process, which adopts orphans until it is closed."""

    def __init__(self, module: str = "tests.chaos.zygote") -> None:
        self._adopted = adopt_orphans(True)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = os.environ | {"PYTHONPATH": str(TESTS.parent), "OMP_WAIT_POLICY": "PASSIVE"}
        argv = [sys.executable, "-m", module, str(theirs.fileno())]
        self._process = Popen(argv, pass_fds=(theirs.fileno(),), env=env)
        theirs.close()
        self._socket.settimeout(IMPORT_S)
        assert self._socket.recv(16) == b"imported", "the zygote did not start"

    def fork(self, command: Command, env: dict[str, str], stdout: int, status: int) -> int:
        """Run `main` of chaos.disturbed with these arguments; returns the new process's id."""
        asked = {"argv": command.argv, "env": env, "niceness": command.niceness, "parent": os.getpid()}
        socket.send_fds(self._socket, [json.dumps(asked).encode()], [stdout, status])
        return int(self._socket.recv(16))

    def close(self) -> None:
        self._socket.close()
        self._process.wait(10)
        adopt_orphans(self._adopted)


class ForkedChild(Child):
    """A child of the supervisor that a zygote makes. argv of its command: name of its namespace or "", then the words
    behind `kvferry`."""

    def __init__(self, zygote: Zygote, command: Command, echo: Callable[[str], None]) -> None:
        super().__init__(command, echo, lambda child: None)
        self._zygote = zygote

    def _spawn(self) -> Any:
        output_read, output_write = os.pipe()
        read, write = os.pipe()
        try:
            pid = self._zygote.fork(self.command, self._environment(write), output_write, write)
        finally:
            os.close(output_write)
            os.close(write)
        return Forked(pid), os.fdopen(output_read, "rb", buffering=0), os.fdopen(read, "rb", buffering=0)


class Forked:
    """What `Child` needs of a Popen."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self.stdout: IO[bytes] | None = None

    def wait(self) -> int:
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)  # type: ignore[assignment]
        return self.returncode  # type: ignore[return-value]

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)


def serve(descriptor: int) -> None:
    """In the zygote: import, then fork for anyone who asks. Ends with the other side."""
    from kvferry.cli.bootstrap import set_threads

    set_threads(1)
    for name in IMPORTED:
        importlib.import_module(name)
    importlib.import_module("kvferry.kv_transfer.ucx_library").load()
    gc.collect()
    gc.freeze()
    fork_for_requests(descriptor, _live)


def fork_for_requests(descriptor: int, live: Callable[..., None]) -> None:
    """Say "imported" on the socket, then fork for every request on it, until its other side ends.

    A request is JSON with descriptors, stdout and stderr among them; the answer is the id of the new process, an
    orphan, in which `live` is called with all of them and does not return."""
    with socket.socket(fileno=descriptor) as asked:
        asked.send(b"imported")
        while True:
            data, fds, _, _ = socket.recv_fds(asked, 1 << 17, MOST_FDS)
            if not data:
                return
            read, write = os.pipe()
            if not (middle := os.fork()):
                if child := os.fork():
                    os.write(write, str(child).encode())
                    os._exit(0)
                for each in (asked.detach(), read, write):
                    os.close(each)
                live(json.loads(data), *fds)
            os.close(write)
            os.waitpid(middle, 0)
            asked.send(os.read(read, 16))
            for each in (read, *fds):
                os.close(each)


def _live(asked: dict[str, Any], stdout: int, status: int) -> None:
    """In the new process."""
    while os.getppid() != asked["parent"]:
        time.sleep(0.001)
    LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    os.nice(asked["niceness"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(stdout, 1)
    os.dup2(stdout, 2)
    os.environ.clear()
    os.environ.update(asked["env"] | {"KVFERRY_STATUS_FD": str(status)})
    namespace, *words = asked["argv"]
    if namespace and LIBC.setns(os.open(f"/var/run/netns/{namespace}", os.O_RDONLY), CLONE_NEWNET):
        os._exit(3)
    sys.argv = ["kvferry", *words]
    try:
        from tests.chaos.disturbed import main

        main()
    finally:
        os._exit(4)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
