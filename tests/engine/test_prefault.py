"""Memory is resident a little before it is used, without a change of its content, and no more of it is."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from kvferry.engine import prefault
from kvferry.engine.loop import EngineLoop
from kvferry.engine.prefault import Prefault, Region
from kvferry.engine.state_memory import make_rows
from kvferry.runtime.huge_pages import HUGE_PAGE, map_zeros, populate
from tests.toy import make_engine
from tests.waiting import wait_for

SIZE, AHEAD = 64 << 20, 8 << 20

PAGE = torch.frombuffer(map_zeros(mmap.PAGESIZE), dtype=torch.uint8)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not populate(PAGE.data_ptr(), PAGE.nbytes), reason="the system cannot populate memory"
)


def resident(tensor: torch.Tensor) -> int:
    """Bytes of a mapping's pages that are in memory."""
    pages = -(-tensor.nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), found)
    return sum(page & 1 for page in found) * mmap.PAGESIZE


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[torch.Tensor, list[float], Prefault]]:
    """Memory, what the test says is in use of it, and what makes it resident."""
    monkeypatch.setattr(prefault, "AHEAD_BYTES", AHEAD)
    monkeypatch.setattr(prefault, "PAUSE_S", 0.001)
    tensor, used = torch.frombuffer(map_zeros(SIZE), dtype=torch.uint8), [0.0]
    warmer = Prefault(Region(tensor, lambda: used[0]))
    yield tensor, used, warmer
    warmer.stop()


def test_memory_is_resident_ahead_of_its_use_and_no_more(memory: tuple[torch.Tensor, list[float], Prefault]) -> None:
    tensor, used, warmer = memory
    tensor[:100] = 7
    warmer.start()
    for share in (0.0, 0.5, 0.25):
        used[0] = max(used[0], share)
        target = int(used[0] * SIZE) + AHEAD
        wait_for(lambda target=target: resident(tensor) >= target)
        assert resident(tensor) <= target + 2 * HUGE_PAGE
    assert tensor[:100].eq(7).all()
    assert not tensor[100:].any()


def test_the_thread_ends_when_all_is_resident(memory: tuple[torch.Tensor, list[float], Prefault]) -> None:
    tensor, used, warmer = memory
    used[0] = 1.0
    warmer.start()
    wait_for(lambda: not warmer._thread.is_alive())
    assert resident(tensor) == SIZE


def test_the_thread_ends_where_the_system_refuses(
    memory: tuple[torch.Tensor, list[float], Prefault], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, _, warmer = memory
    monkeypatch.setattr(prefault, "populate", lambda address, num_bytes: False)
    warmer.start()
    wait_for(lambda: not warmer._thread.is_alive())
    assert resident(tensor) == 0


def test_an_engine_thread_takes_it_along(memory: tuple[torch.Tensor, list[float], Prefault]) -> None:
    tensor, _, warmer = memory
    engine = make_engine()
    engine.prefault = warmer
    loop = EngineLoop(engine, lambda events: None)
    loop.start()
    wait_for(lambda: resident(tensor) >= AHEAD)
    loop.stop()
    assert not warmer._thread.is_alive()
    assert "prefault" not in {thread.name for thread in threading.enumerate()}


def test_rows_of_states_take_memory_once_they_are_written() -> None:
    rows = make_rows(64, 1 << 18, torch.device("cpu"))
    assert resident(rows) == 0
    rows[0] = 1.0
    assert 0 < resident(rows) <= 2 * HUGE_PAGE
    assert not rows[1:].any()
