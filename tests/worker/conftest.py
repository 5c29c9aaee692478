from __future__ import annotations

import subprocess
import sys

import pytest

from kvferry.worker.ranks import Ranks
from tests.forked_process import ForkedProcess
from tests.forked_python import WORKERS, forked_python

PYTHON, START = sys.executable, Ranks._started


def started(ranks: Ranks, rank: int, memory_fd: int) -> subprocess.Popen[bytes] | ForkedProcess:
    """In the place of `Ranks._started`, unless a test has it start another program."""
    if sys.executable != PYTHON:
        return START(ranks, rank, memory_fd)
    line, *others = ranks._inherited_fds(rank)
    descriptors = (line, memory_fd, *others)
    words = ["-m", "kvferry.worker.rank", str(rank), *map(str, descriptors)]
    return forked_python(WORKERS).start(words, 1, 2, pass_fds=descriptors)


@pytest.fixture(autouse=True)
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of ranks are forks of one that has imported PyTorch; those of tests/cluster/test_ranks_live.py start as
    everywhere."""
    monkeypatch.setattr(Ranks, "_started", started)
