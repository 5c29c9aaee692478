"""Control messages over one TCP socket: non-blocking frames, authenticated once the handshake has agreed on keys.

A frame has a kind, a length and a payload. Sealed frames also have a MAC over the frame's number in its direction, the
header and the payload. So a forged, changed, repeated or dropped frame ends the connection. This module validates all
input from the wire before it is stored or used; it does not depend on UCX."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import socket
import struct
from collections import deque

from kvferry.kv_transfer.link import MAX_MESSAGE_BYTES
from kvferry.protocol.errors import NodeLost
from kvferry.protocol.wire import WireError

CHALLENGE, HELLO, WELCOME, REFUSED, MESSAGE, ALIVE = range(6)
"""Kinds of frames. The first four are of the handshake, which is sent before frames are sealed."""
HANDSHAKE_KINDS = frozenset((CHALLENGE, HELLO, WELCOME, REFUSED))
MAX_HANDSHAKE_BYTES = 8192
MAX_UNSENT_BYTES = 16 * MAX_MESSAGE_BYTES
"""Maximum number of unsent bytes for a peer that does not read; beyond that, the connection is closed."""
READ_BYTES = 1 << 18
READS = 4
"""Number of reads of one socket per turn, so that a peer that writes without pause does not starve other peers."""
HEADER = struct.Struct("<BI")
NUMBER = struct.Struct("<Q")
MAC_BYTES = 16


class Seal:
    """Computes the MACs of one direction's frames, in order."""

    def __init__(self, key: bytes):
        self._keyed = hashlib.blake2b(key=key, digest_size=MAC_BYTES)
        self._number = 0

    def next(self, header: bytes, payload: bytes | bytearray | memoryview) -> bytes:
        """Return the MAC of the next frame."""
        digest = self._keyed.copy()
        digest.update(NUMBER.pack(self._number) + header)
        digest.update(payload)
        self._number += 1
        return digest.digest()


class Stream:
    """One TCP socket, connected or connecting. Only the link thread touches it."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self.descriptor = connection.fileno()
        self.unsent = 0
        self._outbox: deque[memoryview] = deque()
        self._inbox = bytearray()
        self._inward: Seal | None = None
        self._outward: Seal | None = None

    def seal(self, inward: bytes, outward: bytes) -> None:
        """Authenticate all later frames, read and written, with MACs under these keys."""
        self._inward, self._outward = Seal(inward), Seal(outward)

    def connecting(self, code: int) -> None:
        """Check the result of `connect_ex`. Raises OSError if the connection attempt failed."""
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))

    def connected(self) -> None:
        """Check that the socket, which became writable, is connected. Raises OSError if the attempt failed."""
        self.connecting(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def send(self, kind: int, payload: bytes = b"") -> None:
        """Queue one frame and write as much as the kernel takes. Raises NodeLost."""
        header = HEADER.pack(kind, len(payload))
        mac = self._outward.next(header, payload) if self._outward else b""
        for part in (header, payload, mac) if len(payload) > READ_BYTES else (header + payload + mac,):
            if part:
                self._outbox.append(memoryview(part))
                self.unsent += len(part)
        if self.unsent > MAX_UNSENT_BYTES:
            raise NodeLost(f"{self.unsent} bytes are queued for a peer that does not read")
        self.flush()

    def flush(self) -> None:
        """Write as much of the queue as the kernel takes. Raises NodeLost."""
        try:
            while self._outbox:
                sent = self._socket.send(self._outbox[0])
                self.unsent -= sent
                if sent < len(self._outbox[0]):
                    self._outbox[0] = self._outbox[0][sent:]
                    return
                self._outbox.popleft()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise NodeLost(f"control message not sent: {error}") from error

    def fill(self) -> bool:
        """Read up to READS chunks; return False at the end of the stream. Raises NodeLost for a broken connection."""
        try:
            for _ in range(READS):
                data = self._socket.recv(READ_BYTES)
                if not data:
                    return False
                self._inbox += data
                if len(data) < READ_BYTES:
                    break
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            raise NodeLost(f"connection broken: {error}") from error
        return True

    def next(self) -> tuple[int, bytes] | None:
        """Return (kind, payload) of the next complete frame, or None.

        Handshake frames are valid only before `seal`, other kinds only after it. Raises WireError; the connection is
        then unusable."""
        if len(self._inbox) < HEADER.size:
            return None
        header = bytes(self._inbox[: HEADER.size])
        kind, length = HEADER.unpack(header)
        self._check(kind, length)
        end = HEADER.size + length
        whole = end + (MAC_BYTES if self._inward else 0)
        if len(self._inbox) < whole:
            return None
        payload, mac = bytes(self._inbox[HEADER.size : end]), bytes(self._inbox[end:whole])
        del self._inbox[:whole]
        if self._inward and not hmac.compare_digest(mac, self._inward.next(header, payload)):
            raise WireError("a frame with a wrong authentication code")
        return kind, payload

    def _check(self, kind: int, length: int) -> None:
        if kind > ALIVE or (kind in HANDSHAKE_KINDS) is bool(self._inward):
            raise WireError(f"unexpected frame of kind {kind}")
        limit = {MESSAGE: MAX_MESSAGE_BYTES, ALIVE: 0}.get(kind, MAX_HANDSHAKE_BYTES)
        if length > limit:
            raise WireError(f"a frame of {length} bytes, the limit is {limit}")

    def close(self) -> None:
        """Close the socket and drop unsent frames."""
        self._socket.close()
        self._outbox.clear()
        self.unsent = 0
