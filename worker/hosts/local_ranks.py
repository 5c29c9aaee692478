"""Rank processes of a host other than host 0: starts them, reads their heartbeats and ends them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from multiprocessing import Pipe

from kvferry.worker.hosts.remote_rank import StartParams
from kvferry.worker.rank_memory import RankMemory, make_memory


class LocalRanks:
    """Running processes of this host's ranks. Raises OSError."""

    def __init__(self, params: StartParams) -> None:
        settings = params.settings
        memory_fd, pool_fd = make_memory(settings.tensor_parallel_size)
        os.close(pool_fd)
        first = settings.node_rank * settings.ranks_per_host
        self._own = range(first, first + settings.ranks_per_host)
        self._heartbeats = RankMemory(memory_fd, settings.tensor_parallel_size).heartbeats
        self._processes = [_started(rank, memory_fd, params) for rank in self._own]
        os.close(memory_fd)

    @property
    def heartbeats(self) -> list[int]:
        """Return a heartbeat counter of each rank."""
        return [int(self._heartbeats[rank]) for rank in self._own]

    @property
    def ended(self) -> str:
        """Describe which rank has ended; empty if none."""
        for rank, process in zip(self._own, self._processes, strict=True):
            if (status := process.poll()) is not None:
                return f"rank {rank} ended ({f'signal {-status}' if status < 0 else f'exit status {status}'})"
        return ""

    def close(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()
            process.wait()


def _started(rank: int, memory_fd: int, params: StartParams) -> subprocess.Popen[bytes]:
    """Start a rank in a process group of its own, which signals of a terminal do not reach."""
    ours, theirs = Pipe()
    with ours, theirs:
        descriptors = (memory_fd, theirs.fileno())
        command = (sys.executable, "-m", "kvferry.worker.hosts.remote_rank", str(rank), *map(str, descriptors))
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors, process_group=0)
        ours.send_bytes(pickle.dumps(params))
    return process
