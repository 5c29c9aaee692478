"""Authenticated messages between hosts of a node over TCP: a handshake under the cluster secret, then MACs.

The handshake is that of a link (`kv_transfer.handshake`): a challenge, a hello and a welcome, or the reason of a
refusal. It carries the join messages of both ends. Each later message has a MAC, since ranks execute rank 0's
messages."""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import time
from collections.abc import Callable, Iterator

from kvferry.kv_transfer.control_stream import MAC_BYTES, MAX_HANDSHAKE_BYTES, Seal
from kvferry.kv_transfer.handshake import Handshake, HandshakeTerms
from kvferry.protocol.errors import Incompatible
from kvferry.protocol.wire import WireError
from kvferry.runtime.address import family_of

HANDSHAKE_S = 5.0
"""Maximum time of a handshake, in seconds."""
MAX_MESSAGE_BYTES = 1 << 32
"""Maximum size of a message after the handshake, in bytes: an adapter's weights, or one run of block parts."""
SMALL_BYTES = 1 << 16
"""Messages shorter than this, in bytes, are written together with their header."""
_LENGTH = struct.Struct("<Q")
_WELCOME, _REFUSED, _BUSY = b"\0", b"\1", b"\2"
"""Answers to a hello: this end's join message, or the reason why it refuses the other end for good, or for now."""


class SealedSocket:
    """Connection to another host. One thread at a time may send, and one may receive.

    Implements `runtime.rank_channel.Line`. host: the other end's address."""

    def __init__(self, connection: socket.socket, keys: tuple[bytes, bytes]) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        self._socket = connection
        self._inward, self._outward = (Seal(key) for key in keys)
        self.host = str(connection.getpeername()[0])

    def send_bytes(self, message: bytes | memoryview, /) -> None:
        """Send a message. Raises OSError."""
        size = memoryview(message).nbytes
        header = _LENGTH.pack(size)
        start = header + self._outward.next(header, message)
        for part in (start + bytes(message),) if size < SMALL_BYTES else (start, message):
            self._socket.sendall(part)

    def recv_bytes(self) -> bytearray:
        """Return the next message.

        Raises OSError for a connection that is broken or was tampered with, EOFError at its end, TimeoutError after the
        time that `limit` allows."""
        start = _exactly(self._socket, _LENGTH.size + MAC_BYTES)
        header, mac = bytes(start[: _LENGTH.size]), start[_LENGTH.size :]
        (length,) = _LENGTH.unpack(header)
        if length > MAX_MESSAGE_BYTES:
            raise OSError(f"a message of {length} bytes, the limit is {MAX_MESSAGE_BYTES}")
        message = _exactly(self._socket, length)
        if not hmac.compare_digest(mac, self._inward.next(header, message)):
            raise OSError("a message with a wrong authentication code")
        return message

    def limit(self, seconds: float) -> None:
        """Set the maximum time to wait for a part of a message, or for room to send one, in seconds."""
        self._socket.settimeout(seconds)

    def shut(self) -> None:
        """End the connection at once: threads that wait for it at both ends get EOFError or OSError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and close the socket."""
        self.shut()
        self._socket.close()


def dial(host: str, port: int, source: str, terms: HandshakeTerms, message: bytes) -> tuple[SealedSocket, bytes]:
    """Connect from the address `source`, shake hands and return the connection with the other end's join message.

    Raises OSError or EOFError if no host answers or it refuses for now, Incompatible if it refuses for good."""
    deadline = time.monotonic() + HANDSHAKE_S
    unbracketed = host.strip("[]")
    with _closed_on_error(socket.create_connection((unbracketed, port), HANDSHAKE_S, (source, 0))) as connection:
        handshake = Handshake(terms, dialled=True)
        try:
            handshake.read_challenge(_read(connection, deadline))
            _write(connection, handshake.hello(message), deadline)
            reply = _read(connection, deadline)
            kind, text = reply[:1], reply[1:].decode(errors="replace")
            if kind == _REFUSED:
                raise Incompatible(text)
            if kind == _BUSY:
                raise ConnectionRefusedError(text)
            handshake.read_welcome(reply[1:])
        except WireError as error:
            raise OSError(f"no host of a node listens at {host}:{port}: {error.message}") from error
        return SealedSocket(connection, handshake.keys()), handshake.peer


def answer(
    connection: socket.socket, terms: HandshakeTerms, meet: Callable[[bytes], bytes]
) -> tuple[SealedSocket, bytes]:
    """Shake hands with a host that has connected and return the connection with its join message.

    meet: returns this end's join message for the other's. Its refusal, Incompatible or, for now, ConnectionRefusedError
    is sent and raised. Raises OSError, EOFError or Incompatible for a peer that is not a host of this node."""
    deadline = time.monotonic() + HANDSHAKE_S
    with _closed_on_error(connection):
        handshake = Handshake(terms, dialled=False)
        _write(connection, handshake.challenge(), deadline)
        try:
            handshake.read_hello(_read(connection, deadline))
            welcome = handshake.welcome(meet(handshake.peer))
        except WireError as error:
            raise OSError(error.message) from error
        except (Incompatible, ConnectionRefusedError) as error:
            kind = _REFUSED if isinstance(error, Incompatible) else _BUSY
            _write(connection, kind + str(error).encode(), deadline)
            raise
        _write(connection, _WELCOME + welcome, deadline)
        return SealedSocket(connection, handshake.keys()), handshake.peer


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises OSError."""
    family, unbracketed = family_of(host)
    return socket.create_server((unbracketed, port), family=family, backlog=256)


@contextlib.contextmanager
def _closed_on_error(connection: socket.socket) -> Iterator[socket.socket]:
    try:
        yield connection
    except BaseException:
        connection.close()
        raise


def _write(connection: socket.socket, message: bytes, deadline: float) -> None:
    connection.settimeout(max(0.01, deadline - time.monotonic()))
    connection.sendall(_LENGTH.pack(len(message)) + message)


def _read(connection: socket.socket, deadline: float) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, deadline))
    if length > 2 * MAX_HANDSHAKE_BYTES:
        raise OSError(f"a handshake message of {length} bytes")
    return bytes(_exactly(connection, length, deadline))


def _exactly(connection: socket.socket, count: int, deadline: float | None = None) -> bytearray:
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        if deadline is not None:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
        got = connection.recv_into(view[done:], min(count - done, 1 << 20))
        if not got:
            raise EOFError
        done += got
    return data
