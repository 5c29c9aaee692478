"""The self-test of devices, over the real UCX between two processes: host memory stands for a device's."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.kv_transfer import device_selftest
from kvferry.kv_transfer.device_selftest import device_self_test, missing
from kvferry.kv_transfer.lane_report import Lane, lane_of
from kvferry.protocol.errors import ConfigError

CUDA = """
[1.1] [vm:1:0]   | ucp_context_0 intra-node cfg#0 | tagged message by ucp_tag_send* from host memory  |
[1.1] [vm:1:0]   |                         0..inf | eager short                    | posix/memory      |
[1.1] [vm:1:0]   | ucp_context_0 intra-node cfg#0 | tagged message by ucp_tag_send* from cuda/GPU0    |
[1.1] [vm:1:0]   |                        0..8191 | eager copy-in copy-out         | posix/memory      |
[1.1] [vm:1:0]   |                        8K..inf | (?) rendezvous zero-copy read  | cuda_ipc/cuda     |
"""


@pytest.mark.parametrize(("transports", "lane"), [("", "posix/memory"), ("tcp", "tcp/lo")])
def test_a_block_reaches_another_process_and_its_lane_is_named(transports: str, lane: str) -> None:
    found = device_self_test("host", "", transports)
    assert found.name == lane
    assert lane in found.describe()


def test_a_device_that_is_not_there_is_an_error_with_the_childs_words() -> None:
    with pytest.raises(
        ConfigError, match=r"no block of cuda:7 reaches another process: .*(_cuda_setDevice|CUDA|NVIDIA)"
    ):
        device_self_test("cuda:7", "")


def test_a_child_that_never_answers_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_selftest, "LIMIT_S", 0.05)
    with pytest.raises(ConfigError, match="no block of host reaches another process"):
        device_self_test("host", "")


def test_the_lane_is_that_of_the_memory_and_the_size() -> None:
    lane = lane_of(CUDA, 2 << 20, "cuda")
    assert lane == Lane("cuda_ipc/cuda", "rendezvous zero-copy read", "cuda")
    assert lane.is_direct
    staged = lane_of(CUDA, 100, "cuda")
    assert (staged.is_direct, staged.describe()[:19]) == (False, "through host memory")
    assert lane_of(CUDA, 100, "rocm").describe() == "over a lane that UCX does not name"


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_selftest, "has_module", lambda platform: False)
    assert "libuct_cuda.so" in missing("cuda")
    monkeypatch.setattr(device_selftest, "has_module", lambda platform: True)
    monkeypatch.setattr(device_selftest, "LIBRARIES", {"cuda": ("libnone.so.1",)})
    assert "libnone.so.1 of the driver is not found" in missing("cuda")
    assert missing("") == ""


def test_a_corrupted_block_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    child = device_selftest._Child("host", "", "", "", "64")
    child.block, answers = np.zeros(64, dtype=np.uint8), list[bytes]()
    monkeypatch.setattr(child.link, "send", lambda peer, data: answers.append(data))
    child._landed(None, None)
    child.block = child.pattern
    child._landed(None, None)
    assert answers == [b"the block arrived corrupted", b"whole"]
