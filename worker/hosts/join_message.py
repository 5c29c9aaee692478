"""JoinMessage, the first between two hosts of a node; checks of a host's settings, and those that must match."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvferry.kv_transfer.handshake import HandshakeTerms
from kvferry.protocol.errors import ConfigError, Incompatible
from kvferry.protocol.settings import WorkerSettings
from kvferry.protocol.version import VERSION
from kvferry.runtime.address import is_loopback
from kvferry.runtime.cluster_secret import ClusterSecrets

HOST = "host"
"""Purpose of a host's own connection, which carries its heartbeats; `worker.ranks` has those of its ranks."""
JOIN_S = 600.0
"""Maximum time that the hosts wait for each other, in seconds."""
HEARTBEAT_S = 0.1
"""Seconds between two heartbeats of a host."""


@dataclass(frozen=True, slots=True)
class JoinMessage:
    """Join message of a host or of one of its ranks.

    number: number of the host, or of the rank among all ranks. meeting: the token that host 0 issued; empty before
    that. address, device, model, threads: settings of the host, which host 0 sends to the host's ranks."""

    purpose: str
    number: int
    meeting: str = ""
    address: str = ""
    device: str = ""
    model: str = ""
    threads: int = 0

    def encode(self) -> bytes:
        """Return the message as bytes."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> JoinMessage:
        """Return the message in these bytes. Raises Incompatible."""
        try:
            found: dict[str, Any] = json.loads(data)
            given = JoinMessage(**found)
        except (ValueError, TypeError) as error:
            raise Incompatible(f"not a join message of a host: {error}") from error
        wrong = [each.name for each in fields(given) if type(getattr(given, each.name)).__name__ != each.type]
        if wrong:
            raise Incompatible(f"a host's join message has a wrong {wrong[0]}")
        return given


def terms(settings: WorkerSettings, secrets: ClusterSecrets, revision: str) -> HandshakeTerms:
    """Return the settings in which all hosts of a node must agree.

    settings: include the chosen device. revision: revision of the model's weights."""
    return HandshakeTerms(
        secrets.links,
        {
            "kvferry version": VERSION,
            "model revision": revision,
            "nnodes": str(settings.nnodes),
            "tensor_parallel_size": str(settings.tensor_parallel_size),
            "kind of device": settings.device.partition(":")[0],
            "role": settings.role,
            "cluster": settings.cluster,
        },
    )


def require_hosts(settings: WorkerSettings) -> None:
    """Raise ConfigError if the settings of several hosts contradict each other."""
    hosts, ranks = settings.nnodes, settings.tensor_parallel_size
    if settings.node_rank >= hosts:
        raise ConfigError(f"--node-rank {settings.node_rank} must be below --nnodes {hosts}", param="node_rank")
    if hosts == 1:
        return
    if ranks % hosts:
        raise ConfigError(
            f"--tensor-parallel-size {ranks} cannot be divided by --nnodes {hosts}", param="tensor_parallel_size"
        )
    if not settings.master_addr:
        raise ConfigError(f"--nnodes {hosts} needs --master-addr, the address of host 0", param="master_addr")
    local = is_loopback(settings.master_addr)
    if is_loopback(settings.own_address) and not local:
        raise ConfigError(
            f"--host {settings.own_address} cannot be reached from other hosts; set --host, and --advertise-host "
            "where they differ",
            param="host",
        )
    if not local and not (settings.cluster_secret or settings.cluster_secret_file):
        raise ConfigError(
            f"--nnodes {hosts} needs --cluster-secret-file: ranks execute what host 0 sends them",
            param="cluster_secret_file",
        )
