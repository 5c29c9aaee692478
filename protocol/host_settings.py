"""Settings of a node whose ranks run on several hosts, under the names that torchrun and vLLM give them."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.scale_out_settings import ScaleOutSettings
from kvferry.protocol.setting import setting

MAX_HOSTS = 64
"""Maximum number of hosts of one node."""


@dataclass(frozen=True, kw_only=True)
class HostSettings(ScaleOutSettings):
    """Hosts of a node: how many there are, which one this is, and where the first one listens for the others."""

    tensor_parallel_size: int = setting(
        1,
        "ranks per node: processes, one per GPU where there are GPUs, each with a part of every layer and KV block",
        min=1,
        max=64,
        short="-tp",
    )
    nnodes: int = setting(
        1,
        "hosts that share a node's ranks; each has --tensor-parallel-size / --nnodes of them",
        min=1,
        max=MAX_HOSTS,
    )
    node_rank: int = setting(
        0, "number of this host, below --nnodes; host 0 serves, the others compute for it", min=0, max=MAX_HOSTS - 1
    )
    master_addr: str = setting("", "address of host 0, at which the other hosts of the node join it")
    master_port: int = setting(29500, "port on which host 0 listens for the other hosts", min=1, max=65535)

    @property
    def ranks_per_host(self) -> int:
        """Return the number of ranks on each host."""
        return max(1, self.tensor_parallel_size // self.nnodes)

    @property
    def own_address(self) -> str:
        """Return the address at which other hosts reach this one, without brackets."""
        return (self.advertise_host or self.host).strip("[]")
