"""A node on a GPU says at its start how its blocks travel, and starts whatever it finds."""

from __future__ import annotations

import pytest
import torch

from kvferry.kv_transfer.lane_report import Lane
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker import link_check
from kvferry.worker.link_check import check_device_link

GPU = torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("found", "level", "words"),
    [
        (
            Lane("cuda_ipc/cuda", "zero-copy", "cuda"),
            "INFO",
            "cuda:1 reached another process whole, over cuda_ipc/cuda",
        ),
        (Lane("tcp/lo", "zero-copy", "cuda"), "WARNING", "through host memory, over tcp/lo"),
        (ConfigError("no block of cuda:1 reaches another process"), "ERROR", "no block of cuda:1"),
    ],
)
def test_the_lane_or_the_fault_is_logged(
    found: Lane | ConfigError, level: str, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def self_test(*given: str) -> Lane:
        assert given == ("cuda:1", "cuda", "tcp", "")
        if isinstance(found, ConfigError):
            raise found
        return found

    monkeypatch.setattr(link_check, "device_self_test", self_test)
    caplog.set_level("INFO", "kvferry.worker")
    check_device_link(WorkerSettings(ucx_transports="tcp"), GPU)
    ((_, logged, message),) = [(r.name, r.levelname, r.getMessage()) for r in caplog.records]
    assert logged == level
    assert words in message


def test_nodes_whose_blocks_are_in_host_memory_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(link_check, "device_self_test")
    check_device_link(WorkerSettings(), torch.device("cpu"))
    check_device_link(WorkerSettings(tensor_parallel_size=2), GPU)
