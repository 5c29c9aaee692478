"""Process of a rank on a host other than host 0: connects to host 0, then computes like any other rank.

Arguments: the rank, then file descriptors of the ranks' shared memory on this host and of the pipe with its
StartParams."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass

from kvferry.protocol.settings import WorkerSettings
from kvferry.runtime.cluster_secret import ClusterSecrets
from kvferry.runtime.log import set_up_log
from kvferry.runtime.rank_channel import RankChannel
from kvferry.worker.hosts.join_message import JoinMessage, terms
from kvferry.worker.hosts.sealed_socket import SealedSocket, dial
from kvferry.worker.rank import compute, run
from kvferry.worker.ranks import CALLS, MOVES


@dataclass(frozen=True, slots=True)
class StartParams:
    """Start parameters of a host's ranks.

    meeting: token that host 0 issued to this host for its ranks. revision: revision of the model's weights."""

    settings: WorkerSettings
    meeting: str
    revision: str


def follow(rank: int, memory_fd: int, params: StartParams) -> None:
    """Connect to host 0 and compute until it ends. Raises OSError, EOFError, Incompatible."""
    settings = params.settings
    set_up_log(settings.log_level, settings.log_format)
    agreed = terms(settings, ClusterSecrets(settings), params.revision)

    def line(purpose: str) -> SealedSocket:
        message = JoinMessage(purpose, rank, meeting=params.meeting).encode()
        return dial(settings.master_addr, settings.master_port, settings.own_address, agreed, message)[0]

    compute(rank, RankChannel(line(CALLS)), memory_fd, -1, RankChannel(line(MOVES)))


def main() -> None:
    """Run a rank on a host other than host 0."""
    rank, memory_fd, descriptor = map(int, sys.argv[1:])
    params: StartParams = pickle.loads(RankChannel(descriptor).receive())  # noqa: S301 - from its host, over its own pipe
    run(rank, lambda: follow(rank, memory_fd, params))


if __name__ == "__main__":
    main()
