"""A client that speaks to a link's port without being a link: whatever a stranger, or a member gone wrong, may send."""

from __future__ import annotations

import select
import socket
import time

from kvferry.kv_transfer.control_stream import CHALLENGE, HEADER, HELLO, Stream
from kvferry.kv_transfer.handshake import Handshake, HandshakeTerms
from kvferry.kv_transfer.ucx_library import context_options, load
from kvferry.runtime.address import parse_host_port


def worker_address() -> bytes:
    """Of a worker that is gone: enough for a greeting."""
    api = load().api
    context = api.UCXContext(context_options("127.0.0.1"), (api.Feature.TAG, api.Feature.WAKEUP))
    worker = api.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
    return worker.address.tobytes()


class Stranger:
    """One connection to the address, driven by hand."""

    def __init__(self, address: str, terms: HandshakeTerms = HandshakeTerms()):  # noqa: B008
        self.socket = socket.create_connection(parse_host_port(address), timeout=5)
        self.greeting = Handshake(terms, dialled=True)
        self.stream = Stream(self.socket)

    def raw(self, data: bytes) -> None:
        self.socket.settimeout(5)
        try:
            self.socket.sendall(data)
        except OSError:
            """The link closed the connection, as it should."""

    def next(self, limit_s: float = 5.0) -> tuple[int, bytes] | None:
        """The next frame; None: the link closed the connection."""
        self.socket.setblocking(False)
        until = time.monotonic() + limit_s
        while (frame := self.stream.next()) is None:
            assert time.monotonic() < until, "neither a frame nor the end"
            select.select([self.socket], [], [], 0.1)
            if not self.stream.fill():
                return self.stream.next()
        return frame

    def read_challenge(self) -> None:
        kind, data = self.next() or (None, b"")
        assert kind == CHALLENGE
        self.greeting.read_challenge(data)

    def hello(self, address: bytes = b"") -> bytes:
        """The payload of a HELLO that answers the challenge."""
        self.read_challenge()
        return self.greeting.hello(address or worker_address())

    def greet(self) -> tuple[int, bytes] | None:
        """Greet as a link does; what the link answers. The connection is sealed from then on."""
        self.raw(frame(HELLO, self.hello()))
        answer = self.next()
        self.stream.seal(*self.greeting.keys())
        return answer

    def ended(self, limit_s: float = 5.0) -> bool:
        """Whether the link closes the connection; frames before that are thrown away."""
        self.socket.settimeout(limit_s)
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self.socket.close()


def frame(kind: int, payload: bytes) -> bytes:
    """Without a seal."""
    return HEADER.pack(kind, len(payload)) + payload
