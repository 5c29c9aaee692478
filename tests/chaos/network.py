"""Network namespaces for the nodes: lines that can be cut, be cut in one direction, or be made thin. Needs root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

NOWHERE = "02:00:00:00:00:fe"
"""A hardware address that nobody has: what is sent there is dropped in silence."""


def run(*words: str, check: bool = True) -> None:
    subprocess.run(words, check=check, capture_output=True)


def possible() -> bool:
    """Whether this process may make namespaces and lines between them."""
    try:
        with Network.made(("try",)):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


class Network:
    """A bridge on which each node has a namespace with an `eth0`; this machine is the gateway. Names carry the process
    id, so that runs do not meet."""

    def __init__(self, names: Sequence[str]) -> None:
        self._tag = f"{os.getpid() % 46656:x}"
        self._third = 1 + os.getpid() % 250
        self._places = {name: place for place, name in enumerate(names)}
        self.gateway = f"10.77.{self._third}.1"
        self._bridge = f"kvb{self._tag}"

    @classmethod
    @contextmanager
    def made(cls, names: Sequence[str]) -> Iterator[Network]:
        """The network, while the block runs. Raises OSError or CalledProcessError where it cannot be had."""
        network = cls(names)
        try:
            network._make()
            yield network
        finally:
            network._remove()

    def address(self, name: str) -> str:
        return f"10.77.{self._third}.{10 + self._places[name]}"

    def cut(self, name: str, cut: bool) -> None:
        """Both directions, of everything; sockets hear nothing of it."""
        run("ip", "link", "set", self._line(name), "nomaster" if cut else "master", *(() if cut else (self._bridge,)))

    def deaden(self, name: str, other: str, dead: bool) -> None:
        """What `name` sends to `other` (a node or "gateway") is lost; what comes from there arrives."""
        address = self.gateway if other == "gateway" else self.address(other)
        space = self.space(name)
        if dead:
            words = ("lladdr", NOWHERE, "nud", "permanent")
            run("ip", "-n", space, "neigh", "replace", address, "dev", "eth0", *words)
        else:
            run("ip", "-n", space, "neigh", "del", address, "dev", "eth0", check=False)  # two faults may overlap

    def narrow(self, name: str, mbit: float) -> None:
        """0: as wide as it is."""
        space = self.space(name)
        if mbit:
            shape = ("tbf", "rate", f"{mbit:.3f}mbit", "burst", "32kbit", "latency", "400ms")
            run("tc", "-n", space, "qdisc", "replace", "dev", "eth0", "root", *shape)
        else:
            run("tc", "-n", space, "qdisc", "del", "dev", "eth0", "root")

    def space(self, name: str) -> str:
        """Name of its namespace."""
        return f"kv{self._tag}-{name}"

    def _line(self, name: str) -> str:
        return f"kvl{self._tag}{self._places[name]}"

    def _make(self) -> None:
        run("ip", "link", "add", self._bridge, "type", "bridge")
        run("ip", "addr", "add", f"{self.gateway}/24", "dev", self._bridge)
        run("ip", "link", "set", self._bridge, "up")
        for name in self._places:
            space, line = self.space(name), self._line(name)
            run("ip", "netns", "add", space)
            run("ip", "link", "add", line, "type", "veth", "peer", "name", "eth0", "netns", space)
            run("ip", "link", "set", line, "master", self._bridge, "up")
            run("ip", "-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            run("ip", "-n", space, "link", "set", "eth0", "up")
            run("ip", "-n", space, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for name in self._places:
            subprocess.run(("ip", "netns", "del", self.space(name)), capture_output=True)
            subprocess.run(("ip", "link", "del", self._line(name)), capture_output=True)
        subprocess.run(("ip", "link", "del", self._bridge), capture_output=True)
