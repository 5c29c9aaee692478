"""Mutual authentication of a link connection: each side proves that it knows the cluster secret; settings must match.

    accepting → CHALLENGE   mark, wire version, nonce
    dialling  → HELLO       mark, wire version, nonce, proof, Terms
    accepting → WELCOME     proof, Terms          or REFUSED  the reason as text

A proof is an HMAC-SHA256 under the secret over the message's name, both nonces and the Terms. So a recorded proof
cannot be replayed, and neither side's proof can be reflected to it. Terms are parsed only after their proof is
verified. Without a secret (empty key) every proof verifies. This module does no I/O."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.protocol.errors import Incompatible
from kvferry.protocol.layout import WIRE_VERSION
from kvferry.protocol.link_messages import LinkTerms
from kvferry.protocol.wire import WireError, pack, unpack

MARK = b"kvferry\0"
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
FIRST_BYTES = len(MARK) + 1 + NONCE_BYTES
OTHER_SECRET = "the two nodes do not share a cluster secret"


@dataclass(frozen=True, slots=True)
class HandshakeTerms:
    """Secrets and shared settings that this node brings to a handshake.

    secrets: read at each handshake. The node dials with the first one and accepts all. A single empty one means that
    the cluster has no secret."""

    secrets: Callable[[], Sequence[bytes]] = field(default=lambda: (b"",), repr=False)
    settings: Mapping[str, str] = field(default_factory=dict)
    version: int = WIRE_VERSION


class Handshake:
    """One side of one handshake.

    After the other side's proof is verified, `peer` is the address of its UCX worker, and `keys` returns the keys for
    the frames that follow. They derive from the secret that the dialling side used."""

    def __init__(self, terms: HandshakeTerms, dialled: bool):
        self._terms, self._dialled = terms, dialled
        self._secrets = terms.secrets()
        self._secret = self._secrets[0]
        self._own = secrets.token_bytes(NONCE_BYTES)
        self._other = b""
        self.peer = b""

    def challenge(self) -> bytes:
        """Return the CHALLENGE message. Accepting side."""
        return self._first()

    def read_challenge(self, challenge: bytes) -> None:
        """Read the CHALLENGE message. Dialling side. Raises WireError, Incompatible."""
        if len(challenge) != FIRST_BYTES:
            raise WireError("not a challenge of the link protocol")
        self._take_first(challenge)

    def hello(self, address: bytes) -> bytes:
        """Return the HELLO message with this side's proof. Dialling side, after `read_challenge`."""
        body = self._body(address)
        return self._first() + self._under_secret(b"hello", body) + body

    def read_hello(self, hello: bytes) -> None:
        """Verify the HELLO message. Accepting side.

        Raises WireError, or Incompatible with the reason to send to the other side."""
        if len(hello) < FIRST_BYTES + PROOF_BYTES:
            raise WireError("not a handshake of the link protocol")
        self._take_first(hello[:FIRST_BYTES])
        proof, body = hello[FIRST_BYTES : FIRST_BYTES + PROOF_BYTES], hello[FIRST_BYTES + PROOF_BYTES :]
        for secret in self._secrets:
            if hmac.compare_digest(proof, self._under(secret, b"hello", body)):
                self._secret = secret
        self._take(b"hello", hello[FIRST_BYTES:])

    def welcome(self, address: bytes) -> bytes:
        """Return the WELCOME message with this side's proof. Accepting side, after `read_hello`."""
        body = self._body(address)
        return self._under_secret(b"welcome", body) + body

    def read_welcome(self, welcome: bytes) -> None:
        """Verify the WELCOME message. Dialling side. Raises WireError, Incompatible."""
        self._take(b"welcome", welcome)

    def keys(self) -> tuple[bytes, bytes]:
        """Return the keys of inbound and outbound frames."""
        up, down = self._under_secret(b"to accepting"), self._under_secret(b"to dialling")
        return (down, up) if self._dialled else (up, down)

    def _first(self) -> bytes:
        return MARK + bytes((self._terms.version,)) + self._own

    def _take_first(self, data: bytes) -> None:
        if not data.startswith(MARK):
            raise WireError("not a link")
        version = data[len(MARK)]
        if version != self._terms.version:
            raise Incompatible(f"one node speaks wire version {version}, the other {self._terms.version}")
        self._other = data[len(MARK) + 1 :]

    def _body(self, address: bytes) -> bytes:
        return pack(LinkTerms(address, tuple(sorted(self._terms.settings.items()))))

    def _take(self, name: bytes, data: bytes) -> None:
        proof, body = data[:PROOF_BYTES], data[PROOF_BYTES:]
        if not hmac.compare_digest(proof, self._under_secret(name, body)):
            raise Incompatible(OTHER_SECRET)
        theirs = unpack(body)
        if not isinstance(theirs, LinkTerms):
            raise WireError("not terms of the link protocol")
        self._compare(dict(theirs.settings))
        self.peer = theirs.address

    def _compare(self, theirs: dict[str, str]) -> None:
        for name in sorted(theirs.keys() | self._terms.settings.keys()):
            one, other = theirs.get(name, "unknown"), self._terms.settings.get(name, "unknown")
            if one != other:
                raise Incompatible(
                    f"{name} differs: {one[:100]} on one node, {other[:100]} on the other", param=name[:100]
                )

    def _under_secret(self, name: bytes, body: bytes = b"") -> bytes:
        return self._under(self._secret, name, body)

    def _under(self, secret: bytes, name: bytes, body: bytes) -> bytes:
        nonces = self._own + self._other if self._dialled else self._other + self._own
        return hmac.digest(secret, b"kvferry link " + name + b"\0" + nonces + body, "sha256")
