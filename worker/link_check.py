"""Check at the start of a node on a GPU that blocks of its pool reach other processes, and over which lane."""

from __future__ import annotations

import logging

import torch

from kvferry.kv_transfer.device_selftest import device_self_test
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker.link_factory import platform_of

log = logging.getLogger("kvferry.worker")


def check_device_link(settings: WorkerSettings, device: torch.device) -> None:
    """Log the lane of a block between two processes, or why there is none; the node starts in either case.

    Call it before memory is measured: the processes take some of the GPU's while they run. Nodes with several ranks
    send blocks from host memory and need no check."""
    platform = platform_of(device)
    if not platform or settings.tensor_parallel_size > 1:
        return
    memory = f"cuda:{device.index or 0}"
    try:
        lane = device_self_test(memory, platform, settings.ucx_transports, settings.ucx_net_devices)
    except ConfigError as error:
        log.error("%s. Transfers of KV blocks will fail or end this process", error.message)
        return
    level = logging.INFO if lane.is_direct else logging.WARNING
    log.log(level, "a block of %s reached another process whole, %s", memory, lane.describe())
