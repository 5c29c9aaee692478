"""Ranks of a node on several hosts, seen from rank 0: starts those of host 0 and waits for those of the other hosts."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvferry.engine.ranks.rendezvous import Rendezvous, TcpRendezvous
from kvferry.protocol.layout import KVLayout
from kvferry.protocol.settings import WorkerSettings
from kvferry.runtime.rank_channel import RankZeroChannels
from kvferry.worker.device_ranks import DeviceRanks
from kvferry.worker.hosts.listener import HostListener


class HostRanks(DeviceRanks):
    """Other ranks of a node. Ranks below --tensor-parallel-size / --nnodes run on this host.

    Each rank has its own pool, on CPUs too. revision: revision of the model's weights. Raises OSError, ConfigError."""

    def __init__(self, settings: WorkerSettings, device: torch.device, revision: str) -> None:
        self._hosts = HostListener(replace(settings, device=str(device)), revision)
        try:
            self._hosts.meet()
            super().__init__(settings, device)
        except BaseException:
            self._hosts.close()
            raise

    def make_pool(self, layout: KVLayout, blocks: int) -> torch.Tensor:
        """Make the pools, after which the other hosts are ready."""
        kv = super().make_pool(layout, blocks)
        self._hosts.ready = True
        return kv

    @property
    def heartbeats(self) -> list[int]:
        """Return a heartbeat counter of each other rank, from any thread."""
        return [*super().heartbeats[: self._settings.ranks_per_host - 1], *map(int, self._hosts.heartbeats)]

    @property
    def ended(self) -> str | None:
        """Describe which rank or host has ended or failed, from any thread; None if none."""
        return self._hosts.fault or super().ended

    @property
    def leaving(self) -> bool:
        """Return whether another host was asked to stop, so that the node should drain."""
        return self._hosts.leaving

    def close(self) -> None:
        """End the other ranks, on all hosts."""
        self._hosts.close()
        super().close()

    def _channels(self, purpose: str) -> RankZeroChannels:
        return RankZeroChannels(self._settings.ranks_per_host - 1, self._hosts.ranks(purpose))

    def _settings_of(self, rank: int) -> WorkerSettings:
        """Return the settings of another host's rank, with that host's address, device, model and threads."""
        settings, number = super()._settings_of(rank), rank // self._settings.ranks_per_host
        if not number:
            return settings
        host = self._hosts.hosts[number]
        return replace(
            settings, node_rank=number, host=host.address, advertise_host=host.address, model=host.model,
            device=host.device, threads=host.threads,
        )  # fmt: skip

    def _make_rendezvous(self) -> Rendezvous:
        return TcpRendezvous(self._settings.own_address, serves=True)
