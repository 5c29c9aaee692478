"""Outbound connections of a dock: one per address, dialled again after a loss."""

from __future__ import annotations

from kvferry.kv_transfer.link import Link, Peer


class OutboundConnections:
    """Outbound connections by address. Runs on the link thread."""

    def __init__(self, link: Link):
        self._link = link
        self._peers: dict[str, Peer] = {}

    def peer(self, address: str) -> Peer:
        """Return the connection to the address; begin one if there is none."""
        if address not in self._peers:
            self._peers[address] = self._link.connect(address)
        return self._peers[address]

    def forget(self, peer: Peer) -> None:
        """Forget a connection that is lost or being closed."""
        for address in [a for a, known in self._peers.items() if known == peer]:
            del self._peers[address]
