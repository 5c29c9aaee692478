"""Launch of a node's other ranks (on a CPU, on GPUs or on several hosts), after checks of settings and GPUs."""

from __future__ import annotations

import torch

from kvferry.engine.ranks.shard import BY_EXPERT, FLAG
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker.device_ranks import DeviceRanks
from kvferry.worker.hosts.host_ranks import HostRanks
from kvferry.worker.ranks import Ranks


def start_ranks(settings: WorkerSettings, device: torch.device, revision: str = "") -> Ranks | None:
    """Start the processes of the other ranks, which begin to load their shards; None with a single rank.

    revision: revision of the model's weights, which all hosts must have. Raises ConfigError if they cannot be started.
    """
    if settings.tensor_parallel_size == 1:
        if settings.enable_expert_parallel:
            raise ConfigError("--enable-expert-parallel needs --tensor-parallel-size 2 or more", param=BY_EXPERT)
        return None
    flags = f"--tensor-parallel-size {settings.tensor_parallel_size}"
    apart = device.type == "cuda" or settings.pools_apart or settings.nnodes > 1
    if apart and settings.batch_invariant:
        raise ConfigError(
            f"{flags} is not supported with --batch-invariant where each rank has its own pool", param=FLAG
        )
    require_gpus(settings, device)
    try:
        if settings.nnodes > 1:
            return HostRanks(settings, device, revision)
        return (DeviceRanks if apart else Ranks)(settings, device)
    except (OSError, AttributeError) as error:
        raise ConfigError(f"{flags}: the other ranks cannot be started: {error}", param=FLAG) from error


def require_gpus(settings: WorkerSettings, first: torch.device) -> None:
    """Raise ConfigError unless there is a GPU for each rank."""
    ranks, count = settings.ranks_per_host, torch.cuda.device_count()
    index = first.index or 0
    if first.type == "cuda" and index + ranks > count:
        found = f"this machine has {count}" if count else "this machine has none"
        flags = f"--tensor-parallel-size {settings.tensor_parallel_size}"
        if settings.nnodes > 1:
            flags += f" on --nnodes {settings.nnodes}"
        raise ConfigError(f"{flags} needs GPUs from {first} on, one per rank; {found}", param=FLAG)
