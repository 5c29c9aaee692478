"""Self-test of transfers from device to device: one block between two child processes, and the lane that UCX took.

Both ends are children, because UCX without support for the device reads its pointers as the host's, and crashes.
Arguments of a child: the memory (host or a torch device), its platform, transports, network devices, the block's size,
and the address to send to, for the sender only."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
from typing import Any

import numpy as np

from kvferry.kv_transfer.lane_report import Lane, lane_of
from kvferry.kv_transfer.link import Peer
from kvferry.kv_transfer.selftest import host_of
from kvferry.kv_transfer.tags import block_tag
from kvferry.kv_transfer.ucx import UcxLink
from kvferry.kv_transfer.ucx_library import has_module, load
from kvferry.protocol.errors import ConfigError

BLOCK_BYTES = 2 << 20
LIMIT_S = 60.0
"""Longest duration of the whole test in seconds; children import torch and open the device."""
TAG = block_tag(1, 1, 0)
ADDRESS, LANDED = "kvferry: address", "kvferry: landed"
"""Beginnings of a child's lines: the receiver's address, and the sender's outcome."""
LIBRARIES = {"cuda": ("libcuda.so.1", "libnvidia-ml.so.1"), "rocm": ()}
"""Libraries of the driver that UCX's module of the platform loads."""


def device_self_test(
    memory: str, platform: str, transports: str = "", net_devices: str = "", size_bytes: int = BLOCK_BYTES
) -> Lane:
    """Send a block of `memory` between two processes, compare it, and return the lane that it took.

    memory: cuda:N, or host to test without a device. platform: cuda, rocm or "". Raises ConfigError with the cause as
    far as it is known."""
    load()
    arguments = [memory, platform, transports, net_devices, str(size_bytes)]
    receiver = _started(arguments)
    limit = threading.Timer(LIMIT_S, receiver.kill)
    limit.start()
    output, address, sent = "", "", ""
    try:
        assert receiver.stdout is not None
        while not address and (line := receiver.stdout.readline()):
            output += line
            address = line.split()[-1] if line.startswith(ADDRESS) else ""
        sent = _sent(arguments, address) if address else ""
    finally:
        limit.cancel()
        ended = receiver.poll()
        receiver.kill()
        output += receiver.communicate()[0]
    if f"{LANDED} whole" not in sent:
        raise _failed(memory, platform, f"{output}\n{sent}", ended)
    return lane_of(sent, size_bytes, platform or "host")


def _started(arguments: list[str]) -> subprocess.Popen[str]:
    environment = os.environ | {"UCX_PROTO_INFO": "y", "PYTHONUNBUFFERED": "1"}
    command = (sys.executable, "-m", "kvferry.kv_transfer.device_selftest", *arguments)
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def _sent(arguments: list[str], address: str) -> str:
    """Run the sender; return its output, with its exit status if it ended early."""
    sender = _started([*arguments, address])
    try:
        output = sender.communicate(timeout=LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        sender.kill()
        output = sender.communicate()[0] + f"\nno answer within {LIMIT_S:g} s"
    return output + (f"\nthe sender ended with status {sender.returncode}" if sender.returncode else "")


def _failed(memory: str, platform: str, output: str, status: int | None) -> ConfigError:
    """status: of the receiver, if it ended by itself; negative: the number of the signal."""
    lines = (line for line in output.splitlines() if line.strip() and not re.search(r"\||\+-|^kvferry: address", line))
    words = [*list(lines)[-2:], *([f"the receiver ended with status {status}"] if status else [])]
    last = "; ".join(words) or f"no answer within {LIMIT_S:g} s"
    remedy = missing(platform) or "try --ucx-transports tcp,cuda_copy, and run both processes in one IPC namespace"
    return ConfigError(f"no block of {memory} reaches another process: {last}. {remedy}", param="ucx_transports")


def missing(platform: str) -> str:
    """Describe what UCX lacks to reach a platform's memory; "" if nothing is known to be missing."""
    if platform and not has_module(platform):
        return f"This UCX has no module for {platform} (libuct_{platform}.so): install the build with it"
    for name in LIBRARIES.get(platform, ()):
        try:
            ctypes.CDLL(name)
        except OSError:
            return f"{name} of the driver is not found, so UCX leaves {platform} out: mount it into the container"
    return ""


class _Child:
    """One end of the test: its block, and a link that knows the device."""

    def __init__(self, memory: str, platform: str, transports: str, net_devices: str, size: str) -> None:
        self._memory, self._size = memory, int(size)
        self.ended, self.error = threading.Event(), ""
        self.link = UcxLink(
            host_of(net_devices), transports=transports, net_devices=net_devices, gpu=platform, prepare=self._select
        )
        self._select()
        self.pattern = np.random.default_rng(1).integers(0, 256, self._size, dtype=np.uint8)

    def send(self, address: str) -> None:
        """Send the block; wait until the receiver says whether it is whole."""
        block = self._block(self.pattern)

        def go() -> None:
            peer = self.link.connect(address)
            self.link.send(peer, b"self-test")
            self.link.send_block(peer, TAG, block, lambda error: self._end(error) if error else None)

        self._run(go)
        if self.error:
            raise SystemExit(self.error)

    def receive(self) -> None:
        """Receive the block from the first peer and tell it the outcome; run until the parent kills the process."""
        self.block = self._block(np.zeros_like(self.pattern))
        self.link.start(self)
        print(ADDRESS, self.link.address)
        threading.Event().wait(LIMIT_S)

    def message(self, peer: Peer, data: bytes) -> None:
        """Handle the sender's greeting, or the receiver's answer."""
        if data == b"self-test":
            self.link.receive_block(peer, TAG, self.block, lambda error: self._landed(peer, error))
        else:
            print(LANDED, data.decode())
            self._end(None if data == b"whole" else ValueError(data.decode()))

    def peer_lost(self, peer: Peer, error: Exception) -> None:
        """Handle the end of the other process."""
        self._end(error)

    def _landed(self, peer: Peer, error: Exception | None) -> None:
        whole = error is None and np.array_equal(self._bytes(), self.pattern)
        self.link.send(peer, b"whole" if whole else str(error or "the block arrived corrupted").encode())

    def _run(self, go: Any) -> None:
        self.link.start(self)
        self.link.submit(go)
        if not self.ended.wait(LIMIT_S):
            self.error = f"no answer within {LIMIT_S:g} s"
        self.link.stop()

    def _end(self, error: Exception | None) -> None:
        self.error = self.error or (str(error) if error else "")
        self.ended.set()

    def _select(self) -> None:
        """Make the device current on this thread."""
        if self._memory != "host":
            import torch

            torch.cuda.set_device(self._memory)

    def _block(self, content: np.ndarray) -> Any:
        if self._memory == "host":
            return content.copy()
        import torch

        block = torch.from_numpy(content).to(self._memory)
        torch.cuda.synchronize(self._memory)
        return block

    def _bytes(self) -> np.ndarray:
        return np.asarray(self.block if self._memory == "host" else self.block.cpu())


if __name__ == "__main__":
    child = _Child(*sys.argv[1:6])
    if sys.argv[6:]:
        child.send(sys.argv[6])
    else:
        child.receive()
