"""Self-test of the UCX link: sends blocks between two links of this process, checks them and measures the rate."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass

import numpy as np
import psutil

from kvferry.kv_transfer.link import Peer
from kvferry.kv_transfer.tags import block_tag
from kvferry.kv_transfer.ucx import UcxLink
from kvferry.protocol.errors import ConfigError
from kvferry.runtime.address import loopback

BLOCK_BYTES = 1 << 19
LIMIT_S = 20.0
ROUNDS = 3
"""Number of transfers; the fastest one counts."""


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Result of the self-test. `bytes_per_s` is the best of a few rounds.

    Both ends share this process, so two processes may be faster."""

    bytes_per_s: float
    size_bytes: int
    transports: str

    def describe(self) -> str:
        """Return the result as text for the operator."""
        rate = f"{self.bytes_per_s / 1e9:.1f} GB/s"
        return f"{self.size_bytes >> 20} MiB moved and verified over {self.transports}: {rate}"


class _End:
    """Handler of one end: records the first peer heard and any loss."""

    def __init__(self) -> None:
        self.peer: Peer = None
        self.event = threading.Event()
        self.error: Exception | None = None

    def message(self, peer: Peer, data: bytes) -> None:
        self.peer = peer
        self.event.set()

    def peer_lost(self, peer: Peer, error: Exception) -> None:
        self.error = error
        self.event.set()


def self_test(transports: str = "", net_devices: str = "", size_bytes: int = 16 << 20) -> TransferResult:
    """Send size_bytes (rounded up to whole blocks) ROUNDS times and compare. Raises ConfigError naming the remedy."""
    host = host_of(net_devices)
    near, far = _End(), _End()
    sender = UcxLink(host, transports=transports, net_devices=net_devices)
    receiver = UcxLink(host, transports=transports, net_devices=net_devices)
    receiver.start(far)
    try:
        sender.start(near)
        try:
            peer = _connect(sender, receiver, near, far)
            rate = max(_round(sender, receiver, peer, far, size_bytes, number) for number in range(1, ROUNDS + 1))
        finally:
            sender.stop()
    finally:
        receiver.stop()
    return TransferResult(rate, size_bytes, transports or "tcp,posix,self")


def host_of(net_devices: str) -> str:
    """Return an address of the named network devices to dial; the loopback address if lo is among them."""
    devices = [name.partition(":")[0] for name in net_devices.split(",") if name]
    if not devices or "lo" in devices:
        return loopback()
    known = psutil.net_if_addrs()
    for name in devices:
        for address in known.get(name, ()):
            if address.family == socket.AF_INET:
                return str(address.address)
    remedy = f"choose --ucx-net-devices among: {', '.join(sorted(known))}"
    raise ConfigError(f"no network device {net_devices!r} with an IPv4 address; {remedy}", param="ucx_net_devices")


def _connect(sender: UcxLink, receiver: UcxLink, near: _End, far: _End) -> Peer:
    peers: list[Peer] = []

    def go() -> None:
        peers.append(sender.connect(receiver.address))
        sender.send(peers[0], b"self-test")

    sender.submit(go)
    limit = time.monotonic() + LIMIT_S
    while not far.event.wait(0.05):
        if near.error is not None or time.monotonic() > limit:
            raise _failed(near.error or TimeoutError(f"no connection within {LIMIT_S:g} s"))
    if far.peer is None:
        raise _failed(far.error)
    return peers[0]


def _round(sender: UcxLink, receiver: UcxLink, peer: Peer, far: _End, size_bytes: int, number: int) -> float:
    """Transfer and compare all blocks once; return the bytes per second."""
    count = -(-size_bytes // BLOCK_BYTES)
    source = np.random.default_rng(number).integers(0, 256, (count, BLOCK_BYTES), dtype=np.uint8)
    target = np.ones_like(source)
    landed, sent = _Counter(count), _Counter(count)

    def post() -> None:
        for index in range(count):
            receiver.receive_block(far.peer, block_tag(1, number, index), target[index], landed)

    def send() -> None:
        for index in range(count):
            sender.send_block(peer, block_tag(1, number, index), source[index], sent)

    receiver.submit(post)
    began = time.perf_counter()
    sender.submit(send)
    if not landed.event.wait(LIMIT_S) or landed.error is not None:
        raise _failed(landed.error or TimeoutError(f"blocks did not arrive within {LIMIT_S:g} s"))
    seconds = time.perf_counter() - began
    if not np.array_equal(source, target):
        raise _failed(ValueError("blocks arrived corrupted"))
    return count * BLOCK_BYTES / seconds


class _Counter:
    """Counts completions; keeps the first error."""

    def __init__(self, count: int):
        self._remaining = count
        self.event = threading.Event()
        self.error: Exception | None = None

    def __call__(self, error: Exception | None) -> None:
        self.error = self.error or error
        self._remaining -= 1
        if error is not None or not self._remaining:
            self.event.set()


def _failed(error: Exception | None) -> ConfigError:
    return ConfigError(
        f"the UCX self-test failed: {error}. Try --ucx-transports tcp, name a device with --ucx-net-devices, and check "
        "that no firewall drops local connections"
    )
