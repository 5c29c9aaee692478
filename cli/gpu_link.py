"""Report of the lane over which UCX moves blocks of a GPU (`kvferry doctor`)."""

from __future__ import annotations

from kvferry.cli.gpu_detection import gpu_for_blocks


def block_lane(device: str, transports: str, net_devices: str) -> tuple[str, str]:
    """Return what was found, and a remedy if blocks pass through host memory.

    device: `--device`; transports, net_devices: UCX_TLS and UCX_NET_DEVICES. Raises ConfigError if nothing arrives."""
    name, platform = gpu_for_blocks(device)
    if not name:
        return "no GPU, so KV blocks are in host memory", ""
    from kvferry.kv_transfer.device_selftest import device_self_test

    lane = device_self_test(name, platform, transports, net_devices)
    found = f"a block of {name} reached another process whole, {lane.describe()}"
    if lane.is_direct:
        return found, ""
    return found, f"add {platform}_ipc to --ucx-transports; containers need one IPC namespace"
