"""UCX link, the implementation of Link: joins its thread (ucx_loop), connections (ucx_connections) and ucx_traffic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvferry.kv_transfer.control_stream import MESSAGE
from kvferry.kv_transfer.handshake import HandshakeTerms
from kvferry.kv_transfer.link import MAX_MESSAGE_BYTES, Done, LinkHandler, Peer
from kvferry.kv_transfer.ucx_blocks import Post
from kvferry.kv_transfer.ucx_connections import ConnectionTimeouts, UcxConnections
from kvferry.kv_transfer.ucx_library import context_options, load, require_rocm
from kvferry.kv_transfer.ucx_loop import UcxLoop
from kvferry.protocol.errors import ConfigError, NodeLost
from kvferry.runtime.address import host_port

NO_TERMS = HandshakeTerms()


class UcxLink:
    """Link over UCX and TCP. Implements kv_transfer.link.Link.

    host            address that peers dial; also decides the default devices
    listen          host to listen on, by default `host`; 0.0.0.0 for all addresses of the machine
    port            0 lets the kernel choose
    transports      UCX_TLS; net_devices UCX_NET_DEVICES; empty: see ucx_library.context_options
    gpu             cuda or rocm: add the lanes of that platform; prepare then makes the device current on the link
                    thread
    ping_interval   seconds between ALIVE frames
    silence_limit   seconds of silence after which a peer counts as lost
    connect_timeout seconds per attempt to connect, of three attempts
    terms           the cluster's secrets, and settings that both ends of a connection must share
    on_fault        called once, on the link thread, when an exception ends that thread: no operation will complete any
                    more, so the process must end; its argument is also `fault` from then on
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        listen: str | None = None,
        transports: str = "",
        net_devices: str = "",
        gpu: str = "",
        prepare: Callable[[], None] | None = None,
        ping_interval: float = 0.4,
        silence_limit: float = 2.0,
        connect_timeout: float = 2.0,
        terms: HandshakeTerms = NO_TERMS,
        on_fault: Callable[[str], None] = lambda fault: None,
    ):
        self._host, self._port = host, port
        self._listen = host if listen is None else listen
        self._options = context_options(host, transports, net_devices, gpu)
        library = load()
        if gpu == "rocm":
            require_rocm()
        self._loop = UcxLoop(library, self._options, prepare, self._opened, self._closing, on_fault)
        self.native_id: int | None = None
        """Native id of the link thread, once it runs."""
        timeouts = ConnectionTimeouts(ping_interval, silence_limit, connect_timeout)
        self._connections = UcxConnections(library, self._loop, timeouts, terms)
        self._traffic = self._connections.traffic

    @property
    def address(self) -> str:
        return host_port(self._host, self._port)

    @property
    def fault(self) -> str | None:
        """Return the error that ended the link thread, or None."""
        return self._loop.fault

    @property
    def heartbeat(self) -> float:
        """Return the monotonic time of the link thread's last round or command.

        An idle thread runs a round at every ping."""
        return self._loop.heartbeat

    def start(self, handler: LinkHandler) -> None:
        self._handler = handler
        try:
            self._loop.start()
        except Exception as error:
            raise ConfigError(
                f"the UCX link cannot start on port {self._port} with {self._options}: {error}. Choose another "
                "--link-port, or check --ucx-transports and --ucx-net-devices with `kvferry doctor`"
            ) from error
        self.native_id = self._loop.native_id

    def stop(self) -> None:
        self._loop.stop()

    def submit(self, call: Callable[[], None]) -> None:
        self._loop.submit(call)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._loop.call_later(delay_s, call)

    def connect(self, address: str) -> Peer:
        return self._connections.dial(address)

    def send(self, peer: Peer, data: bytes) -> None:
        assert len(data) <= MAX_MESSAGE_BYTES, f"control message of {len(data)} bytes"
        known = self._connections.find(peer)
        if known is None:
            return
        if known.open:
            self._traffic.send(known, MESSAGE, data)
        else:
            known.outbox.append(data)

    def send_block(self, peer: Peer, tag: int, buffer: Any, done: Done) -> None:
        self._post(peer, Post(True, tag, buffer, done))

    def receive_block(self, peer: Peer, tag: int, buffer: Any, done: Done) -> None:
        self._post(peer, Post(False, tag, buffer, done))

    def disconnect(self, peer: Peer, quiet: Callable[[], None]) -> None:
        self._connections.disconnect(peer)
        self._loop.submit(quiet)

    def _post(self, name: Peer, post: Post) -> None:
        peer = self._connections.find(name)
        if peer is not None:
            self._traffic.post(peer, post)
        else:
            self._loop.submit(lambda: post.done(NodeLost(f"{name}: not connected")))

    # Calls of the link thread.

    def _opened(self) -> None:
        self._port = self._connections.listen(self._listen, self._port, self._handler)

    def _closing(self) -> None:
        self._connections.close()
