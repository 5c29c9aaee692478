"""One process of a local cluster, as its supervisor holds it: started, listened to, ended."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from cli.door import ERROR_PREFIX
from cli.options import variable

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_LINE_LIMIT = 1024 * 1024
_LAST_WORDS_S = 0.5


@dataclass(frozen=True, slots=True)
class Command:
    """What to run. `env` is added to the supervisor's environment without its KVFERRY_* variables: the command line
    alone configures a child.

    reports       the command writes its status as node/status.py does
    ends_last     the others need it until they have ended
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    reports: bool = True
    ends_last: bool = False


class Child:
    """A command that runs, or ran, or runs again. `changed(child)` is called when progress or readiness changes, and
    `echo(line)` for each line of its output, which carries the child's name."""

    def __init__(self, command: Command, echo: Callable[[str], None], changed: Callable[[Child], None]) -> None:
        self.command = command
        self.name = command.name
        self.progress = 0.0
        self.url: str | None = None
        self.ready = asyncio.Event()
        self.ever_ready = False
        self.complaint = ""
        self._echo = echo
        self._changed = changed
        self._process: Process | None = None
        self._ready_at = 0.0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def healthy_s(self) -> float:
        """Seconds since the running process became ready; 0 if it has not."""
        return time.monotonic() - self._ready_at if self.ready.is_set() else 0.0

    async def run_once(self) -> int:
        """Start the command and wait for its end. Returns the exit status, negative for a signal. `complaint` then is
        the line that explains status 2; it is not echoed."""
        self.progress, self.url, self.complaint = 0.0, None, ""
        self.ready.clear()
        reports, write = os.pipe()
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                *self.command.argv,
                env=self._environment(write),
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                limit=_LINE_LIMIT,
                pass_fds=(write,),
                preexec_fn=partial(_die_with, os.getpid()),
            )
        except BaseException:
            os.close(reports)
            raise
        finally:
            os.close(write)
        return await self._until_end(process, reports)

    def signal(self, number: signal.Signals) -> None:
        """Send it to the process, if it runs."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _until_end(self, process: Process, reports: int) -> int:
        assert process.stdout is not None
        ears = [
            asyncio.create_task(self._hear_output(process.stdout)),
            asyncio.create_task(self._hear_reports(reports)),
        ]
        try:
            status = await process.wait()
            await asyncio.wait(ears, timeout=_LAST_WORDS_S)
            if self.complaint and status != 2:
                self._echo(f"[{self.name}] {ERROR_PREFIX}{self.complaint}")
            return status
        finally:
            self._process = None
            for ear in ears:
                ear.cancel()
            await asyncio.gather(*ears, return_exceptions=True)

    async def _hear_output(self, output: asyncio.StreamReader) -> None:
        async for text in _lines(output):
            if text.startswith(ERROR_PREFIX) and not self.ever_ready:
                self.complaint = text.removeprefix(ERROR_PREFIX)
            else:
                self._echo(f"[{self.name}] {text}")

    async def _hear_reports(self, descriptor: int) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
        )
        try:
            async for text in _lines(reader):
                self._take_report(text)
        finally:
            transport.close()

    def _take_report(self, text: str) -> None:
        try:
            report = json.loads(text)
            if report["status"] == "ready":
                self.url, self.progress, self._ready_at = str(report["url"]), 1.0, time.monotonic()
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


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """Decoded lines without their ends; what exceeds the limit is dropped."""
    while True:
        try:
            line = await reader.readline()
        except ValueError:
            continue
        if not line:
            return
        yield line.decode(errors="replace").rstrip()


def _die_with(parent: int) -> None:
    """Between fork and exec: have Linux kill this process when the supervisor ends, be it by SIGKILL."""
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
