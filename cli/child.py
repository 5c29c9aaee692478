"""Child process of a local cluster: its start, status reports, output and exit."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from typing import IO

from kvferry.cli.bootstrap import ERROR_PREFIX
from kvferry.cli.options import variable

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_LINE_LIMIT = 1024 * 1024
_OUTPUT_WAIT_S = 0.5
"""Time for reading the output of a process after its exit, in seconds."""


@dataclass(frozen=True, slots=True)
class Command:
    """Command line and environment of a child process.

    The child gets `env` and the supervisor's environment without its KVFERRY_* variables: only the command line
    configures a child.

    reports       the command reports its status as in runtime/supervisor_status.py
    ends_last     other children need it until they exit; it blocks SIGINT, which a terminal sends to all processes
    address       its address, if it does not report one
    niceness      added to the supervisor's own; a process with a higher value gets a smaller share of contended cores
    fds           descriptors of the supervisor that it inherits
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    reports: bool = True
    ends_last: bool = False
    address: str = ""
    niceness: int = 0
    fds: tuple[int, ...] = ()


class Child:
    """Command that runs as a child process, across restarts; `facts` holds the details of its last ready report.

    It calls `changed(child)` when progress or readiness changes, and `echo(line)` for each line of output, prefixed
    with the child's name."""

    def __init__(self, command: Command, echo: Callable[[str], None], changed: Callable[[Child], None]) -> None:
        self.command = command
        self.name = command.name
        self.progress = 0.0
        self.url: str | None = None
        self.facts: dict[str, str] = {}
        self.ready = asyncio.Event()
        self.ever_ready = False
        self.startup_error = ""
        self.last_line = ""
        self._echo = echo
        self._changed = changed
        self._process: Popen[bytes] | None = None
        self._ready_at = 0.0

    @property
    def pid(self) -> int | None:
        """Return the process id; None if the command does not run."""
        return self._process.pid if self._process is not None else None

    def healthy_s(self) -> float:
        """Return the seconds since the running process became ready; 0 if it has not."""
        return time.monotonic() - self._ready_at if self.ready.is_set() else 0.0

    async def run_once(self) -> int:
        """Start the command, wait until it exits and return its exit status, negative for a signal.

        Afterwards `startup_error` holds the line that explains status 2, which is not echoed, and `last_line` the last
        echoed line. Cancellation kills the process."""
        self.progress, self.url, self.startup_error, self.last_line = 0.0, None, "", ""
        self.ready.clear()
        process, output, reports = self._spawn()
        readers = [
            asyncio.create_task(self._read_lines(output, self._on_output)),
            asyncio.create_task(self._read_lines(reports, self._on_report)),
        ]
        try:
            self._process = process
            status = await _exit_status(process)
            await asyncio.wait(readers, timeout=_OUTPUT_WAIT_S)
            return status
        finally:
            self._process = None
            process.kill()
            process.wait()
            for reader_task in readers:
                reader_task.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    def show_startup_error(self) -> None:
        """Echo the error line that `run_once` did not echo."""
        if self.startup_error:
            self._echo(f"[{self.name}] {ERROR_PREFIX}{self.startup_error}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def _spawn(self) -> tuple[Popen[bytes], IO[bytes], IO[bytes]]:
        """Start the process; return it with its output pipe and its report pipe."""
        read, write = os.pipe()
        reports = os.fdopen(read, "rb", buffering=0)
        try:
            process = Popen(
                self.command.argv,
                bufsize=0,
                env=self._environment(write),
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                pass_fds=(write, *self.command.fds),
                preexec_fn=partial(_prepare, os.getpid(), self.command),
            )
        except BaseException:
            reports.close()
            raise
        finally:
            os.close(write)
        assert process.stdout is not None
        return process, process.stdout, reports

    async def _read_lines(self, pipe: IO[bytes], on_line: Callable[[str], None]) -> None:
        reader = asyncio.StreamReader(limit=_LINE_LIMIT)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            async for text in _lines(reader):
                on_line(text)
        finally:
            transport.close()

    def _on_output(self, text: str) -> None:
        if text.startswith(ERROR_PREFIX) and not self.ever_ready:
            self.startup_error = text.removeprefix(ERROR_PREFIX)
        elif text:
            self.last_line = text
            self._echo(f"[{self.name}] {text}")

    def _on_report(self, text: str) -> None:
        try:
            report = json.loads(text)
            if report["status"] == "ready":
                self.url, self.progress, self._ready_at = str(report["url"]), 1.0, time.monotonic()
                self.facts = {name: str(fact) for name, fact in dict(report.get("facts", {})).items()}
                self.ever_ready = True
                self.ready.set()
            else:
                self.progress = float(report["progress"])
        except (ValueError, KeyError, TypeError):
            self._echo(f"[{self.name}] unreadable status report: {text}")
            return
        self._changed(self)

    def _environment(self, status_fd: int) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(variable(""))}
        env |= self.command.env
        if self.command.reports:
            env[variable("status_fd")] = str(status_fd)
        return env


async def _exit_status(process: Popen[bytes]) -> int:
    """Return the exit status as soon as the process exits; its own children may still hold its pipes open."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
        return process.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield decoded lines without line ends; drops lines longer than the limit."""
    while True:
        try:
            line = await reader.readline()
        except ValueError:
            continue
        if not line:
            return
        yield line.decode(errors="replace").rstrip()


def _prepare(parent: int, command: Command) -> None:
    """Prepare the child between fork and exec: Linux kills it when the supervisor dies, even by SIGKILL."""
    if command.ends_last:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    os.nice(command.niceness)
