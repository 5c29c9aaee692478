"""DeviceGroup: collective operations of ranks with a device each, by torch.distributed: NCCL on GPUs, gloo on CPUs.

A rank has a group object of its own and uses no process-wide registry, so a process may be a rank of several nodes.
`engine.ranks.rendezvous` is where ranks find each other."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kvferry.engine.ranks.rendezvous import Rendezvous
from kvferry.engine.ranks.shard import FLAG
from kvferry.protocol.errors import ConfigError, reason
from kvferry.runtime.address import is_loopback

_dist: Any = dist  # torch's process groups have no type stubs
TIMEOUT = timedelta(seconds=120)
"""Longest wait for another rank, at the rendezvous and within a step; the group fails afterwards."""


def device_of(rank: int, first: torch.device) -> torch.device:
    """Return a rank's device: GPUs are numbered by rank from the first rank's GPU on."""
    return torch.device("cuda", (first.index or 0) + rank) if first.type == "cuda" else first


class DeviceGroup:
    """Implements `engine.ranks.group.Group` for tensors on `device`, once it is connected.

    A sum is the same on all ranks, since each number is added up in one place. The order of addition depends on the
    place."""

    apart = True

    def __init__(self, rank: int, ranks: int, device: torch.device, rendezvous: Rendezvous) -> None:
        """Create an unconnected group, which owns its rendezvous."""
        self.rank, self.ranks = rank, ranks
        self._device, self._rendezvous = device, rendezvous
        self._backend: Any = None

    def connect(self, where: bytes = b"") -> None:
        """Return once all ranks are connected and a test sum is right.

        where: `where` of rank 0's rendezvous. Raises ConfigError if they are not connected in time."""
        try:
            store = self._rendezvous.store(self.rank, self.ranks, where, TIMEOUT)
            self._backend = self._nccl(store) if self._device.type == "cuda" else self._gloo(store)
            found = self.sum(torch.full((3,), 1.0 + self.rank, device=self._device)).tolist()
        except Exception as error:
            message = f"the {self.ranks} ranks cannot reach each other: {reason(error)}"
            raise ConfigError(message, param=FLAG) from error
        if found != [self.ranks * (self.ranks + 1) / 2] * 3:
            raise ConfigError(f"the {self.ranks} ranks compute wrong sums: {found[0]}", param=FLAG)

    def close(self) -> None:
        """Close the connections.

        Must not be called while an operation is running. An abandoned group leaves its rendezvous open. NCCL's
        communicator ends with the process, because ending it may wait for ranks that are gone."""
        if self._backend is not None and self._device.type == "cpu":
            self._backend = None
            self._rendezvous.close()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self._backend.allreduce([x]).wait()
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(self.ranks * x.numel())
        self._backend._allgather_base(out, x.reshape(-1)).wait()
        return out.view(self.ranks, *x.shape)

    def written(self) -> None:
        """Do nothing: each rank writes shared heads' K/V into a pool of its own."""

    def _gloo(self, store: Any) -> Any:
        """Return a gloo backend that listens on the rendezvous's address only."""
        kind = _dist.ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(hostname=self._rendezvous.address)]
        options._timeout = TIMEOUT
        return kind(store, self.rank, self.ranks, options)

    def _nccl(self, store: Any) -> Any:
        """Return an NCCL backend; where all ranks are on one host, its bootstrap listens on loopback.

        The environment may say otherwise."""
        if is_loopback(self._rendezvous.address):
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        kind = _dist.ProcessGroupNCCL
        options = kind.Options()
        options._timeout = TIMEOUT
        return kind(store, self.rank, self.ranks, options)
