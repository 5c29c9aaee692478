"""Collective operations of ranks with a device each, by torch.distributed: NCCL on GPUs, gloo on CPUs.

They meet over a file that has no name: anyone who has its descriptor is one of them. Each has its own group object, of
no process-wide registry, so a process may be a rank of several nodes. torch knows the file by its descriptor's number
and writes to it again when a group ends, so a group has a descriptor of its own, which is open for longer than that:
what else got its number would be written to, or end the process where it is no file.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kvferry.engine.ranks.shard import FLAG
from kvferry.protocol.errors import ConfigError, reason

_dist: Any = dist  # its backends have no types
PATIENCE = timedelta(seconds=120)
"""Ranks are there within it, and none is behind another by more in a step: anyone who waits for longer gives up."""
LOOPBACK = "127.0.0.1"


def device_of(rank: int, first: torch.device) -> torch.device:
    """Return a rank's own: GPUs beside each other, from that of the first one on."""
    return torch.device("cuda", (first.index or 0) + rank) if first.type == "cuda" else first


class DeviceGroup:
    """Implements `engine.ranks.group.Group` of tensors on `device`, once it is connected.

    A sum is the same on all ranks, for each number is added up in one place; in which order, depends on that place."""

    apart = True

    def __init__(self, rank: int, ranks: int, device: torch.device, meeting_fd: int) -> None:
        """meeting_fd: of a file that all ranks have, empty before the first one connects; it may be closed at once.

        Raises OSError."""
        self.rank, self.ranks = rank, ranks
        self._device, self._meeting_fd = device, os.dup(meeting_fd)
        self._backend: Any = None

    def connect(self) -> None:
        """Returns once all ranks are connected, and a sum of theirs is right.

        Raises ConfigError: they are not in time."""
        try:
            store = _dist.FileStore(f"/proc/self/fd/{self._meeting_fd}", self.ranks)
            self._backend = self._nccl(store) if self._device.type == "cuda" else self._gloo(store)
            found = self.sum(torch.full((3,), 1.0 + self.rank, device=self._device)).tolist()
        except Exception as error:
            what = f"the {self.ranks} ranks do not reach each other: {reason(error)}"
            raise ConfigError(what, param=FLAG) from error
        if found != [self.ranks * (self.ranks + 1) / 2] * 3:
            raise ConfigError(f"the {self.ranks} ranks add up wrong numbers: {found[0]}", param=FLAG)

    def close(self) -> None:
        """End what is connected.

        Not while anybody brings something; of a group that was left, the descriptor stays. NCCL's ends with the
        process: it may wait for ranks that are gone."""
        if self._backend is not None and self._device.type == "cpu":
            self._backend = None
            os.close(self._meeting_fd)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self._backend.allreduce([x]).wait()
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(self.ranks * x.numel())
        self._backend._allgather_base(out, x.reshape(-1)).wait()
        return out.view(self.ranks, *x.shape)

    def written(self) -> None:
        """Each rank writes what all heads share into its own pool."""

    def _gloo(self, store: Any) -> Any:
        """Within this machine alone."""
        kind = _dist.ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(hostname=LOOPBACK)]
        options._timeout = PATIENCE
        return kind(store, self.rank, self.ranks, options)

    def _nccl(self, store: Any) -> Any:
        """What NCCL listens on while it connects is for this machine alone, unless the environment says otherwise."""
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        kind = _dist.ProcessGroupNCCL
        options = kind.Options()
        options._timeout = PATIENCE
        return kind(store, self.rank, self.ranks, options)
