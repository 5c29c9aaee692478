"""Supervisor of a local cluster: starts child processes, restarts those that die, and ends them all."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.cli.bootstrap import StartupFailed
from kvferry.cli.child import Child, Command
from kvferry.protocol.errors import ConfigError

log = logging.getLogger(__name__)

START_TRIES = 3
"""Consecutive exits of a child that was never ready after which the supervisor gives up."""
DRAIN_S = 2.0
"""Maximum drain when all children end, in seconds: all must be gone five seconds after the signal."""
KILL_GRACE_S = 0.4
"""Time for a child to exit after SIGKILL, and for the last children after SIGTERM, in seconds."""


@dataclass(slots=True)
class Backoff:
    """Delay before a restart: doubles from first_s to max_s, and starts over after healthy_s of health."""

    first_s: float = 0.5
    max_s: float = 10.0
    healthy_s: float = 60.0
    delay_s: float = 0.0

    def after(self, healthy_s: float) -> float:
        """Return the next delay for a process that was healthy for healthy_s before it exited."""
        fresh = not self.delay_s or healthy_s >= self.healthy_s
        self.delay_s = self.first_s if fresh else min(2 * self.delay_s, self.max_s)
        return self.delay_s


class Supervisor:
    """Owner of all child processes, which it restarts when they exit.

    `failure` gets the exception that prevents the cluster from running: ConfigError if a child exited with status 2
    before it was ever ready, StartupFailed if its start failed START_TRIES times."""

    def __init__(
        self,
        echo: Callable[[str], None],
        changed: Callable[[Child], None],
        backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._echo = echo
        self._changed = changed
        self._backoff = backoff
        self._tasks: dict[Child, asyncio.Task[None]] = {}
        self._stopping = False

    @property
    def children(self) -> list[Child]:
        """Return the children in start order."""
        return list(self._tasks)

    def start(self, command: Command) -> Child:
        """Start a command and keep it running until `stop`."""
        child = Child(command, self._echo, self._changed)
        task = asyncio.create_task(self._keep(child), name=command.name)
        task.add_done_callback(self._ended)
        self._tasks[child] = task
        return child

    async def ready(self, children: Iterable[Child]) -> None:
        """Wait until each of these children has reported that it is ready."""
        await asyncio.gather(*(child.ready.wait() for child in children))

    async def stop(self, grace_s: float = 3.5, drain_s: float = DRAIN_S) -> None:
        """End all children, those with `ends_last` after the others; restarts stop at the first call.

        Each gets SIGTERM, a second one after drain_s to cut it short, and SIGKILL if it still runs after grace_s."""
        self._stopping = True
        await self._end([child for child in self._tasks if not child.command.ends_last], grace_s, drain_s)
        await self._end([child for child in self._tasks if child.command.ends_last], KILL_GRACE_S, drain_s)

    async def _end(self, children: Sequence[Child], grace_s: float, drain_s: float) -> None:
        tasks = [self._tasks[child] for child in children]
        for child in children:
            child.signal(signal.SIGTERM)
            if child.pid is None:
                self._tasks[child].cancel()
        drain_s = min(drain_s, grace_s)
        await _wait(tasks, drain_s)
        for child in children:
            child.signal(signal.SIGTERM)
        await _wait(tasks, grace_s - drain_s)
        for child in children:
            child.signal(signal.SIGKILL)
        await _wait(tasks, KILL_GRACE_S)
        for task in tasks:
            task.cancel()

    async def _keep(self, child: Child) -> None:
        backoff = self._backoff()
        tries = 0
        while not self._stopping:
            status = await child.run_once()
            if self._stopping:
                return
            tries += 1
            if not child.ever_ready and child.command.reports:
                _check_start(child, status, tries)
            child.show_startup_error()
            delay = backoff.after(child.healthy_s())
            log.warning("%s ended (%s); restarting it in %.1f s", child.name, describe(status), delay)
            await asyncio.sleep(delay)

    async def watch(self, life: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
        """Run `life` beside the children until it ends, `stop` is set, or a child cannot run.

        Raises what `life` raised, or `failure`."""
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(life), asyncio.create_task(stop.wait())]
        try:
            await asyncio.wait([*tasks, self.failure], return_when=asyncio.FIRST_COMPLETED)
            if not tasks[1].done():
                await (self.failure if self.failure.done() else tasks[0])
        finally:
            for task in tasks:
                task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failure.done():
            self.failure.set_exception(error)


def describe(status: int) -> str:
    """Return an exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return name + (": out of memory?" if name == "SIGKILL" else "")


def _check_start(child: Child, status: int, tries: int) -> None:
    if status == 2:
        raise ConfigError(f"{child.name}: {child.startup_error or child.last_line or 'ended with exit status 2'}")
    if tries >= START_TRIES:
        reason = child.startup_error or child.last_line
        outcome = f"ended {tries} times before it was ready ({describe(status)})"
        raise StartupFailed(f"{child.name} {outcome}{f': {reason}' if reason else ''}", _shell_status(status))


def _shell_status(status: int) -> int:
    """Return the exit status that a shell would report: 128 plus a signal's number; 1 for 0, an unexpected exit."""
    return 128 - status if status < 0 else status or 1


async def _wait(tasks: Sequence[asyncio.Task[None]], timeout_s: float) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=timeout_s)
