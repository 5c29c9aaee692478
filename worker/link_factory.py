"""Construction of a node's UCX link and dock from settings."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvferry.kv_transfer.checksum import ALGORITHM
from kvferry.kv_transfer.dock import Dock
from kvferry.kv_transfer.handshake import HandshakeTerms
from kvferry.kv_transfer.ucx import UcxLink
from kvferry.protocol.settings import WorkerSettings
from kvferry.runtime.thread_priority import lower_priority
from kvferry.worker.device_rank_pool import DeviceRankPool
from kvferry.worker.node_address import NodeAddress
from kvferry.worker.pool_memory import PoolMemory

LINK_NICENESS = 10
"""Niceness of a decode node's link and checksum threads, which yield to the engine thread."""


def platform_of(device: torch.device) -> str:
    """Return the platform of the device's memory: cuda, rocm, or "" for a CPU."""
    if device.type != "cuda":
        return ""
    return "cuda" if torch.version.hip is None else "rocm"


class LinkParts:
    """Factory of a node's link and dock.

    kv: the node's KV pool. apart: the joined pool to use instead, if kv is only rank 0's part."""

    def __init__(
        self, settings: WorkerSettings, address: NodeAddress, kv: torch.Tensor, apart: DeviceRankPool | None = None
    ) -> None:
        self._settings, self._address, self._kv = settings, address, kv
        self._memory = apart or PoolMemory(kv)

    def link(self, on_fault: Callable[[], None]) -> UcxLink:
        """Create the UCX link. on_fault: called on the link thread when that thread ends."""
        settings, checksums = self._settings, ALGORITHM if self._settings.verify_checksums else "off"
        return UcxLink(
            self._address.host,
            settings.link_port,
            listen=settings.host,
            transports=settings.ucx_transports,
            net_devices=settings.ucx_net_devices,
            gpu=platform_of(self._kv.device),
            prepare=self._enter_link,
            terms=HandshakeTerms(self._address.secrets.links, {"checksums": checksums}),
            on_fault=lambda fault: on_fault(),
        )

    def dock(self, link: UcxLink, epoch: int) -> Dock:
        """Create the dock: it moves blocks of the pool over the link under this node's name and epoch."""
        memory = self._memory
        checksums = memory.checksums(link.submit, self._enter_link)
        name = (self._address.node_id, epoch)
        return Dock(link, memory, name=name, verify=self._settings.verify_checksums, checksums=checksums)

    def enter_thread(self) -> None:
        """Select the pool's device. Every thread that uses the device calls it first."""
        if self._kv.device.type == "cuda":
            torch.cuda.set_device(self._kv.device)

    def _enter_link(self) -> None:
        """Prepare the link thread or a checksum thread, which calls it first.

        On a decode node it lowers the thread's priority: on a shared core, running streams come before incoming blocks.
        """
        self.enter_thread()
        if self._settings.role == "decode" or self._settings.elastic:
            lower_priority(LINK_NICENESS)
