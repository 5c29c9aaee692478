"""`kvferry router --workers N`: supervises several router processes on one port.

Each process has its own listening socket (SO_REUSEPORT): the kernel spreads new connections evenly by a hash of their
addresses, and skips processes that have exited. With one inherited socket, the process that became idle last would
accept most connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvferry.cli.child import Child
from kvferry.cli.child_commands import Program, kvferry_program, settings_command
from kvferry.cli.progress import JsonLines, Lines, log_through
from kvferry.cli.supervisor import Supervisor
from kvferry.protocol.settings import RouterSettings
from kvferry.router.worker_peers.peers import call_peer
from kvferry.runtime.http import bind
from kvferry.runtime.signals import StopSignal
from kvferry.runtime.supervisor_status import SupervisorStatus
from kvferry.runtime.suspend_aware_clock import LoopClock

log = logging.getLogger(__name__)

CHECK_S = 1.0
"""Period of health checks of a process, and their timeout, in seconds."""
HUNG_S = 10.0
"""Seconds without an answer after which a process is replaced; nodes abandon its streams long before."""
DRAIN_SPARE_S = 10.0
"""Maximum time for a process to exit after its last request, in seconds."""
HURRY_S = 3.5
"""Time that a process gets to exit after the signal that cuts its drain short, in seconds."""


async def serve_routers(settings: RouterSettings, program: Program = kvferry_program) -> None:
    """Run `settings.workers` routers on one port until SIGTERM, which drains them, or SIGINT.

    When it returns or raises, no router runs. Raises ConfigError or KvferryError if the routers cannot run."""
    progress = (JsonLines if settings.log_format == "json" else Lines)(sys.stderr)
    log_through(progress)
    stop = StopSignal()
    stop.listen()

    def show(child: Child) -> None:
        progress.update(child.name, child.progress, child.ready.is_set())

    supervisor = Supervisor(progress.echo, show)
    with (
        contextlib.closing(bind(settings.host, settings.port)) as sock,
        tempfile.TemporaryDirectory(prefix="kvferry-router-") as folder,
    ):
        shared = dataclasses.replace(settings, port=sock.getsockname()[1], workers_dir=folder)
        try:
            await supervisor.watch(_live(supervisor, shared, program, show), stop.requested)
        finally:
            await _end(supervisor, stop, settings.request_timeout + DRAIN_SPARE_S)


async def _live(
    supervisor: Supervisor, settings: RouterSettings, program: Program, show: Callable[[Child], None]
) -> None:
    """Start the routers, report when all are ready, and watch their health."""
    children = []
    for number in range(settings.workers):
        own = dataclasses.replace(settings, worker=number)
        children.append(supervisor.start(settings_command(f"router-{number}", "router", own, program)))
        show(children[-1])
    clock = LoopClock()
    clock.start()
    folder = Path(settings.workers_dir)
    async with asyncio.TaskGroup() as checks:
        for number, child in enumerate(children):
            checks.create_task(_replace_if_hung(child, folder, number, clock))
        await supervisor.ready(children)
        url = children[0].url or ""
        log.info("%d routers ready at %s", len(children), url)
        SupervisorStatus.from_fd(settings.status_fd).ready(url, **children[0].facts)


async def _replace_if_hung(child: Child, folder: Path, number: int, clock: LoopClock) -> None:
    """Kill a router process that hangs; the supervisor restarts it."""
    answered_at = clock.now()
    while True:
        await asyncio.sleep(CHECK_S)
        if not child.ready.is_set() or await call_peer(folder, number, "alive", within_s=CHECK_S) is not None:
            answered_at = clock.now()
        elif clock.now() - answered_at > HUNG_S:
            log.error("%s has not answered for %.0f s", child.name, HUNG_S)
            child.signal(signal.SIGKILL)
            answered_at = clock.now()


async def _end(supervisor: Supervisor, stop: StopSignal, drain_s: float) -> None:
    """Drain all routers until they exit, or end them at once on `stop.forced`."""
    ending = asyncio.create_task(supervisor.stop(drain_s + HURRY_S, drain_s))
    forced = asyncio.create_task(stop.forced.wait())
    if not stop.requested.is_set():  # a router failed to start: skip the drain
        stop.forced.set()
    await asyncio.wait((ending, forced), return_when=asyncio.FIRST_COMPLETED)
    forced.cancel()
    for child in supervisor.children:
        child.signal(signal.SIGINT)
    await ending
