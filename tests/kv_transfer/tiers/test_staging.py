"""Blocks of a pool on a device on their way to a disk and to a store, and back, through a part of the host's memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.kv_transfer.tiers import object_groups, staging
from kvferry.kv_transfer.tiers.disk import open_disk
from kvferry.kv_transfer.tiers.object_groups import in_chain
from kvferry.kv_transfer.tiers.objects import Objects
from kvferry.kv_transfer.tiers.remote import RemoteTier
from kvferry.protocol.errors import ConfigError, KvferryError, TransferFailed
from tests.kv_transfer.tiers.device import SIZE, Device
from tests.waiting import wait_for

ROOM = 3
"""Blocks at once."""


def named(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in numbers]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(staging, "STAGED", ROOM * SIZE)
    return Device(200)


@pytest.fixture
def disk(device: Device, tmp_path: Path) -> Iterator[Any]:
    tier = open_disk(str(tmp_path), "prefill", 1 << 30, "model", SIZE, device)
    yield tier
    tier.close()


def write(tier: Any, device: Device, *numbers: int) -> int:
    ended: list[int] = []
    assert tier.write(named(*numbers), b"", device.holding(*numbers), ended.append)
    wait_for(lambda: ended)
    return ended[0]


def read(tier: Any, numbers: range, into: range) -> KvferryError | None:
    ended: list[KvferryError | None] = []
    assert tier.read(named(*numbers), list(into), ended.append)
    wait_for(lambda: ended)
    return ended[0]


def test_a_chain_goes_to_disk_and_back_a_few_blocks_at_once(disk: Any, device: Device) -> None:
    assert write(disk, device, *range(1, 11)) == 10
    assert len(list(disk.directory.glob("*.kv"))) == 4
    assert read(disk, range(1, 11), range(101, 111)) is None
    assert read(disk, range(5, 8), range(120, 123)) is None
    assert device.memory[101:111, 0].tolist() == list(range(1, 11))
    assert device.memory[120:123, SIZE - 1].tolist() == [5, 6, 7]
    assert device.most_at_once == ROOM


def test_files_that_are_longer_are_read_a_few_blocks_at_once(tmp_path: Path, device: Device) -> None:
    """A pool on a CPU wrote them, or one whose room was larger."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(staging, "STAGED", 1 << 30)
        larger = open_disk(str(tmp_path), "prefill", 1 << 30, "model", SIZE, device)
    assert write(larger, device, *range(1, 11)) == 10
    larger.close()
    wait_for(lambda: larger._lock_file.closed)
    disk, device.most_at_once = open_disk(str(tmp_path), "prefill", 1 << 30, "model", SIZE, device), 0
    assert len(list(disk.directory.glob("*.kv"))) == 1
    assert read(disk, range(2, 11), range(102, 111)) is None
    assert device.memory[102:111, 7].tolist() == list(range(2, 11))
    assert device.most_at_once == ROOM
    disk.close()


def test_a_device_that_fails_costs_what_was_under_way(disk: Any, device: Device) -> None:
    write(disk, device, 1, 2)

    def fails() -> None:
        raise RuntimeError("the device is lost")

    device.copying = fails
    ended: list[int] = []
    disk.write(named(3), named(2)[0], [3], ended.append)
    wait_for(lambda: ended == [0])
    assert isinstance(read(disk, range(1, 3), range(101, 103)), TransferFailed)
    device.copying = lambda: None
    assert read(disk, range(1, 3), range(101, 103)) is None


def test_where_the_host_has_no_room_for_copies_the_setting_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        open_disk(str(tmp_path), "prefill", 1 << 30, "model", SIZE, Device(1, rows=8))
    assert raised.value.param == "kv_disk_path"


def test_a_group_goes_to_a_store_and_back(device: Device, tmp_path: Path) -> None:
    tier = RemoteTier(Objects(f"file://{tmp_path}/shared"), 0, "model", SIZE, device)
    numbers = range(1, 2 * object_groups.GROUP + 1)
    blocks, there, copied = device.holding(*numbers), [], threading.Semaphore(0)
    chain = list(in_chain(tier.folder, named(*numbers)))
    for group in chain:
        assert tier.write(group, blocks[group.start : group.end], copied.release, there.append)
    for _ in chain:
        assert copied.acquire(timeout=10)
    device.memory[1:40] = 255  # they are somebody else's by now
    wait_for(lambda: there == [True, True])
    ended: list[Any] = []
    assert tier.read(named(*numbers), 5, list(range(106, 106 + len(numbers) - 5)), ended.append)
    wait_for(lambda: ended == [None])
    assert device.memory[106 : 101 + len(numbers), 9].tolist() == list(numbers)[5:]
    tier.close()
