"""Receiver of replicas: copies of running streams' blocks from other nodes, kept in this node's pool."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.engine.engine import Engine
from kvferry.kv_transfer.ports import TransferKey
from kvferry.protocol.errors import KvferryError, TransferFailed, reason
from kvferry.protocol.hashing import chain, root_hash
from kvferry.protocol.link_messages import Commit, Copy, GrantPurpose
from kvferry.protocol.media import block_extras
from kvferry.worker.grant_dispatch import GrantDispatch
from kvferry.worker.service import NodeParts


class ReplicaStore:
    """Receiver of replica blocks.

    Implements `kv_transfer.ports.GrantEvents`, for copies."""

    def __init__(self, base: NodeParts, arrivals: GrantDispatch) -> None:
        self._base, self._arrivals = base, arrivals
        arrivals.take(Copy, self)

    # Called on the link thread.

    def reserve(self, key: TransferKey, purpose: GrantPurpose) -> None:
        """Hash the tokens and request a reservation.

        The hashes are computed here, so a peer can only register blocks under the hashes of their tokens. They are
        computed on the link thread, so no engine step waits for them."""
        assert isinstance(purpose, Copy)
        try:
            self._base.require_ready()
            root = root_hash(self._base.parts.fingerprint, purpose.namespace, purpose.adapter)
            size = self._base.parts.layout.block_size
            hashes = chain(root, purpose.token_ids, size, extras=block_extras(purpose.media, size))
        except KvferryError as error:
            self._arrivals.refuse(key, error)
        else:
            self._base.engine.submit(lambda engine: self._grant(engine, key, hashes, purpose.most))

    def ready(self, key: TransferKey, commit: Commit) -> None:
        self._base.metrics.copy_blocks["kept"].inc(commit.block_count)
        self._base.engine.submit(lambda engine: self._land(engine, key))

    def failed(self, key: TransferKey, error: KvferryError) -> None:
        """Do nothing: the blocks stay held until `quiet`."""

    def quiet(self, key: TransferKey) -> None:
        self._base.engine.submit(lambda engine: engine.copies.quiet(key))

    # On the engine thread.

    def _grant(self, engine: Engine, key: TransferKey, hashes: Sequence[bytes], most: int) -> None:
        try:
            chain = hashes if engine.states is None else engine.states.chain(hashes)
            self._arrivals.receiver.granted(key, *engine.copies.reserve(key, chain, most))
        except Exception as error:
            known = error if isinstance(error, KvferryError) else TransferFailed(reason(error))
            self._arrivals.refuse(key, known)

    def _land(self, engine: Engine, key: TransferKey) -> None:
        engine.copies.land(key)
