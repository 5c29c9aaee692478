"""Process of a host other than host 0 of a node: it joins host 0, runs this host's ranks and ends with either.

It has no lease and serves no requests; its HTTP server reports its state to Kubernetes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from dataclasses import replace

from prometheus_client import CollectorRegistry

from kvferry.model_files.unsupported_models import resolve_runnable
from kvferry.protocol.errors import ConfigError, Incompatible, reason
from kvferry.protocol.settings import WorkerSettings
from kvferry.runtime.address import host_port
from kvferry.runtime.http import serve_metrics
from kvferry.runtime.signals import StopSignal
from kvferry.worker.engine_factory import choose_device
from kvferry.worker.hosts.join_message import HEARTBEAT_S, HOST, JOIN_S, JoinMessage, terms
from kvferry.worker.hosts.listener import READY
from kvferry.worker.hosts.local_ranks import LocalRanks
from kvferry.worker.hosts.remote_rank import StartParams
from kvferry.worker.hosts.sealed_socket import SealedSocket, dial
from kvferry.worker.node_address import NodeAddress
from kvferry.worker.rank_launcher import require_gpus

log = logging.getLogger("kvferry.worker")

LEADER_S = 10.0
"""Seconds without an answer from host 0 after which this host ends. Host 0's own limit is shorter."""
DRAIN_MARGIN_S = 10.0
"""Time beyond --drain-timeout for host 0 to drain and end when this host is asked to stop, in seconds."""
END_S = 2.0
"""Time for a host that is asked to stop to end its ranks, in seconds."""
RETRY_S = 0.5
"""Seconds between two attempts to join."""


class Follower:
    """One host other than host 0, in this process. Raises ConfigError when the settings cannot be used."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.address = NodeAddress(settings, self._health, self.unready)
        serve_metrics(self.address.app, CollectorRegistry(), lambda: None)  # none of its own, for scrapers of all pods
        self.state, self._why = "joining", "it has not joined host 0 yet"
        self._settings, self._leader = settings, host_port(settings.master_addr, settings.master_port)
        self._ended, self._leaving = threading.Event(), False

    async def run(self, stop: StopSignal) -> bool:
        """Join, and compute until host 0 or a rank ends. Return whether this host was asked to stop.

        A host that is asked to stop notifies host 0, which drains, and continues to compute until host 0 has ended.
        Raises ConfigError if host 0 does not accept this host."""
        self.address.start()
        work = asyncio.create_task(asyncio.to_thread(self._work))
        stopping = asyncio.create_task(stop.requested.wait())
        try:
            await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done() and self.state == "ready":
                self._leaving, forced = True, asyncio.create_task(stop.forced.wait())
                limit_s = self._settings.drain_timeout + DRAIN_MARGIN_S
                await asyncio.wait({work, forced}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                forced.cancel()
            self._ended.set()
            await asyncio.wait({work}, timeout=END_S)  # it may be reading weights
            if work.done():
                work.result()
        finally:
            self._ended.set()
            stopping.cancel()
            await self.address.stop()
        return stop.requested.is_set()

    def unready(self) -> str:
        """Return why this host is not computing; empty if it is."""
        return "" if self.state == "ready" else self._why

    def _work(self) -> None:
        settings = self._settings = with_device(self._settings)
        source = resolve_runnable(settings.model, settings.load_format)
        joined = self._join(source.revision)
        if joined is None:
            return
        line, token = joined
        try:
            ranks = LocalRanks(StartParams(settings, token, source.revision))
            try:
                self._follow(line, ranks)
            finally:
                ranks.close()
        finally:
            line.close()

    def _join(self, revision: str) -> tuple[SealedSocket, str] | None:
        """Return the connection to host 0 and its token, or None if asked to stop. Raises ConfigError."""
        settings, deadline = self._settings, time.monotonic() + JOIN_S
        message = JoinMessage(
            HOST, settings.node_rank, address=settings.own_address, device=settings.device, model=settings.model,
            threads=settings.threads,
        ).encode()  # fmt: skip
        agreed = terms(settings, self.address.secrets, revision)
        while not self._ended.is_set():
            try:
                line, welcome = dial(settings.master_addr, settings.master_port, settings.own_address, agreed, message)
                return line, JoinMessage.decode(welcome).meeting
            except Incompatible as error:
                raise ConfigError(f"host 0 at {self._leader} refuses this host: {error.message}") from error
            except (OSError, EOFError) as error:
                self._why = f"host 0 at {self._leader} cannot be joined: {reason(error)}"
                if time.monotonic() > deadline:
                    raise ConfigError(f"after {JOIN_S:.0f} s {self._why}", param="master_addr") from error
            self._ended.wait(RETRY_S)
        return None

    def _follow(self, line: SealedSocket, ranks: LocalRanks) -> None:
        """Exchange heartbeats with host 0 until it, a rank or this process ends."""
        log.info("host %d has joined host 0 at %s", self._settings.node_rank, self._leader)
        line.limit(LEADER_S)
        self._why = "the node is loading"
        try:
            while not self._ended.wait(HEARTBEAT_S):
                if wrong := ranks.ended:
                    log.error("host %d ends: %s", self._settings.node_rank, wrong)
                    line.send_bytes(json.dumps({"ended": wrong}).encode())
                    break
                line.send_bytes(json.dumps({"signs": ranks.heartbeats, "leaving": self._leaving}).encode())
                self.state = "ready" if line.recv_bytes() == READY else "loading"
        except TimeoutError:
            log.error("host 0 at %s has not answered for %.0f s", self._leader, LEADER_S)
        except (OSError, EOFError) as error:
            log.error("host 0 at %s has ended: %s", self._leader, reason(error))
        self.state, self._why = "ended", "the node has ended"

    def _health(self) -> tuple[int, dict[str, object]]:
        return 200, {"status": self.state, "role": self._settings.role, "node_rank": self._settings.node_rank}


def with_device(settings: WorkerSettings) -> WorkerSettings:
    """Return the settings with the device on which this host computes. Raises ConfigError if it lacks GPUs."""
    device = choose_device(settings.device)
    require_gpus(settings, device)
    return replace(settings, device=str(device))


async def serve_follower(settings: WorkerSettings) -> None:
    """Run a host other than host 0 until the node ends, or until SIGTERM or SIGINT.

    The process ends with exit status 1 unless a signal ended it, so that its supervisor restarts it and it joins the
    node's next epoch. Raises ConfigError when it cannot join."""
    stop = StopSignal()
    stop.listen()
    was_stopped = await Follower(settings).run(stop)
    logging.shutdown()
    os._exit(0 if was_stopped else 1)
