"""What left a pool on a device lies in the host's memory, within its bound, and comes back as it was."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.kv_transfer.tiers.host import Arena, open_host
from kvferry.protocol.errors import ConfigError, KvferryError, NotFound, TransferFailed
from tests.kv_transfer.tiers.device import SIZE, Device
from tests.kv_transfer.tiers.told import blocks
from tests.waiting import wait_for

ROWS = 8


def named(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in numbers]


@pytest.fixture
def device() -> Device:
    return Device(250)


@pytest.fixture
def tier(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(Arena, "most", 2)
    made = open_host(ROWS * SIZE + 17, SIZE, device)
    yield made
    made.close()


def write(tier: Any, device: Device, *numbers: int, behind: int = 0) -> int:
    ended: list[int] = []
    assert tier.write(named(*numbers), named(behind)[0] if behind else b"", device.holding(*numbers), ended.append)
    wait_for(lambda: ended)
    return ended[0]


def read(tier: Any, device: Device, *numbers: int) -> KvferryError | None:
    into, ended = [200 + index for index in range(len(numbers))], []
    assert tier.read(named(*numbers), into, ended.append)
    wait_for(lambda: ended)
    if ended[0] is None:
        assert device.memory[into].tolist() == [[number] * SIZE for number in numbers]
    return ended[0]  # type: ignore[no-any-return]


def free(tier: Any) -> int:
    return len(tier._backing._free)


def test_a_chain_is_kept_and_read_in_any_of_its_parts(tier: Any, device: Device) -> None:
    assert write(tier, device, 1, 2, 3, 4, 5) == 5
    device.memory[1:6] = 255
    assert (tier.run(named(1, 2, 3, 4, 5, 6)), tier.used, free(tier)) == (5, 5 * SIZE, ROWS - 5)
    assert read(tier, device, 1, 2, 3, 4, 5) is None
    assert read(tier, device, 4) is None
    assert write(tier, device, 6, behind=5) == 1
    assert read(tier, device, 5, 6) is None


def test_of_what_was_used_longest_ago_the_end_leaves_first(tier: Any, device: Device) -> None:
    told: list[bytes] = []
    tier.changed = lambda stored, removed: told.extend(blocks(removed))
    write(tier, device, 1, 2, 3, 4)
    write(tier, device, 11, 12, 13, 14)
    read(tier, device, 3, 4)
    write(tier, device, 21, 22)
    assert told == named(13, 14)
    write(tier, device, 23, 24, 25, 26, behind=22)
    assert told == named(13, 14, 11, 12, 3, 4)
    assert sorted(tier.hashes()) == sorted(named(1, 2, 21, 22, 23, 24, 25, 26))
    assert free(tier) == 0
    assert isinstance(read(tier, device, 11, 12), NotFound)
    assert read(tier, device, 21, 22, 23, 24, 25, 26) is None


def test_what_is_read_is_not_written_over_though_it_left(tier: Any, device: Device) -> None:
    """Else a prompt would go on from another one's blocks."""
    write(tier, device, 1, 2)
    begun, go = threading.Event(), threading.Event()

    def hold() -> None:
        if threading.current_thread().name == "kv-host-read":
            begun.set()
            go.wait(10)

    device.copying = hold
    ended: list[Any] = []
    assert tier.read(named(1, 2), [200, 201], ended.append)
    assert begun.wait(10)
    tier.drop(named(1))
    wait_for(lambda: not tier._store._evicted)
    assert write(tier, device, 11, 12, 13, 14, 15, 16) == 6
    assert free(tier) == 0
    go.set()
    wait_for(lambda: ended == [None])
    assert device.memory[[200, 201], 3].tolist() == [1, 2]
    assert free(tier) == 2


def test_what_left_before_its_read_began_is_not_read(tier: Any, device: Device) -> None:
    write(tier, device, 1, 2)
    group = tier._store.catalog.find(named(1)[0])
    tier._backing.remove(group)
    assert isinstance(read(tier, device, 1, 2), TransferFailed)
    assert (tier.run(named(1)), free(tier)) == (0, ROWS)


def test_a_copy_that_fails_leaves_nothing(tier: Any, device: Device) -> None:
    def fails() -> None:
        raise RuntimeError("the device is lost")

    device.copying = fails
    assert write(tier, device, 1, 2) == 0
    assert (tier.hashes(), free(tier)) == ([], ROWS)
    device.copying = lambda: None
    assert write(tier, device, 1, 2) == 2


def test_what_is_said_to_be_wrong_is_not_found_and_its_room_is_free(tier: Any, device: Device) -> None:
    write(tier, device, 1, 2, 3, 4)
    write(tier, device, 5)
    tier.drop(named(2))
    assert tier.hashes() == named(5)
    wait_for(lambda: free(tier) == ROWS - 1)


def test_written_twice_it_takes_no_more_room_than_there_is(tier: Any, device: Device) -> None:
    for _ in range(10):
        assert write(tier, device, 1, 2) == 2
    assert read(tier, device, 1, 2) is None
    tier.drop(named(1))
    assert isinstance(read(tier, device, 1, 2), NotFound)


@pytest.mark.parametrize(("size", "rows"), [(SIZE - 1, 100), (10 * SIZE, 9)])
def test_memory_that_is_not_there_is_refused(size: int, rows: int) -> None:
    with pytest.raises(ConfigError) as raised:
        open_host(size, SIZE, Device(1, rows))
    assert raised.value.param == "kv_host_gib"
