"""Blocks on disk: found, within their bound, by one process at a time, and again after a restart."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.kv_transfer.tiers import files, local, read_rates
from kvferry.kv_transfer.tiers.disk import DiskTier, open_disk
from kvferry.protocol.errors import BlocksCorrupt, ConfigError, KvferryError, NotFound
from tests.kv_transfer.tiers.told import blocks
from tests.waiting import wait_for

SIZE = 4096
ROOMY = 1 << 30


def named(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in numbers]


def holding(*numbers: int) -> list[np.ndarray]:
    return [np.full(SIZE, number, np.uint8) for number in numbers]


def write(tier: DiskTier, *numbers: int, behind: int = 0) -> int:
    """How many were written."""
    ended: list[int] = []
    parent = named(behind)[0] if behind else b""
    assert tier.write(named(*numbers), parent, holding(*numbers), ended.append)
    wait_for(lambda: ended)
    return ended[0]


def read(tier: DiskTier, *numbers: int) -> KvferryError | None:
    into = [np.zeros(SIZE, np.uint8) for _ in numbers]
    ended: list[KvferryError | None] = []
    assert tier.read(named(*numbers), into, ended.append)
    wait_for(lambda: ended)
    if ended[0] is None:
        assert [int(each[0]) for each in into] == list(numbers)
    return ended[0]


def close(tier: DiskTier) -> None:
    """Its directory is free for another one."""
    tier.close()
    wait_for(lambda: tier._lock_file.closed)


@pytest.fixture
def dropped() -> list[bytes]:
    return []


@pytest.fixture
def make(tmp_path: Path, dropped: list[bytes]) -> Iterator[Any]:
    made: list[DiskTier] = []

    def make(size: int = ROOMY, name: str = "prefill", fingerprint: str = "model") -> DiskTier:
        made.append(open_disk(str(tmp_path), name, size, fingerprint, SIZE))
        made[-1].changed = lambda stored, removed: dropped.extend(blocks(removed))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


def file_size(count: int) -> int:
    return files.size_of("model", named(*range(count)), SIZE)


def test_a_chain_is_written_and_read_in_any_of_its_parts(make: Any) -> None:
    tier = make()
    assert write(tier, 1, 2, 3, 4) == 4
    assert [tier.run(named(*part)) for part in ((1, 2, 3, 4), (3, 4, 5), (5, 1), ())] == [4, 2, 0, 0]
    assert read(tier, 1, 2, 3, 4) is None
    assert read(tier, 3) is None
    assert write(tier, 5, 6) == 2
    assert read(tier, 4, 5, 6) is None
    assert named(6)[0] in tier
    assert named(7)[0] not in tier


def test_long_chains_are_cut_into_files(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BLOCKS", 3)
    tier = make()
    assert write(tier, *range(1, 9)) == 8
    assert len(list(tier.directory.glob("*.kv"))) == 3
    assert read(tier, *range(1, 9)) is None


def test_what_was_used_longest_ago_makes_room(make: Any, dropped: list[bytes]) -> None:
    tier = make(size=2 * file_size(2))
    write(tier, 1, 2)
    write(tier, 3, 4)
    assert read(tier, 1, 2) is None
    write(tier, 5, 6)
    assert dropped == named(3, 4)
    assert sorted(tier.hashes()) == sorted(named(1, 2, 5, 6))
    assert tier.used == sum(path.stat().st_size for path in tier.directory.glob("*.kv")) <= 2 * file_size(2)
    assert isinstance(read(tier, 3), NotFound)


def test_what_is_larger_than_the_tier_is_not_written(make: Any) -> None:
    tier = make(size=file_size(1))
    assert write(tier, *range(1, 4)) == 0
    assert write(tier, 9) == 1


def test_a_restart_finds_what_was_written_and_in_the_order_of_its_use(make: Any, dropped: list[bytes]) -> None:
    first = make(size=2 * file_size(2))
    write(first, 1, 2)
    write(first, 3, 4)
    read(first, 1, 2)
    close(first)
    again = make(size=2 * file_size(2))
    assert again.directory == first.directory
    assert read(again, 1, 2) is None
    assert read(again, 3, 4) is None
    close(again)
    smaller = make(size=file_size(2))
    assert sorted(smaller.hashes()) == sorted(named(3, 4))


def test_what_was_read_last_is_what_a_restart_keeps(make: Any) -> None:
    tier = make()
    write(tier, 1, 2)
    write(tier, 3, 4)
    for path in tier.directory.glob("*.kv"):
        os.utime(path, (1, 1))
    read(tier, 1, 2)
    close(tier)
    assert make(size=file_size(2)).hashes() == named(1, 2)


def test_each_process_has_a_directory_of_its_own(make: Any) -> None:
    first, second, other_role, other_model = make(), make(), make(name="decode"), make(fingerprint="another")
    write(first, 1)
    assert len({tier.directory for tier in (first, second, other_role, other_model)}) == 4
    assert not any(tier.hashes() for tier in (second, other_role, other_model))


def test_where_nothing_can_be_kept_the_setting_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot keep blocks in") as raised:
        open_disk(str(tmp_path / "file"), "prefill", ROOMY, "model", SIZE)
    assert raised.value.param == "kv_disk_path"


def test_a_file_that_is_wrong_is_not_read_twice(make: Any, dropped: list[bytes]) -> None:
    tier = make()
    write(tier, 1, 2)
    (path,) = tier.directory.glob("*.kv")
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    assert isinstance(read(tier, 1, 2), BlocksCorrupt)
    assert dropped == named(1, 2)
    assert tier.run(named(1, 2)) == tier.used == 0
    assert not path.exists()


def test_what_is_said_to_be_wrong_is_not_found(make: Any, dropped: list[bytes]) -> None:
    tier = make()
    write(tier, 1, 2)
    write(tier, 3)
    tier.drop(named(2, 7))
    assert (dropped, tier.hashes()) == (named(1, 2), named(3))


def test_nor_is_what_was_computed_from_it(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BLOCKS", 2)
    tier = make()
    write(tier, 1, 2, 3, 4, 5)
    write(tier, 6, 7, behind=5)
    write(tier, 8, behind=2)
    write(tier, 9)
    tier.drop(named(3))
    assert sorted(tier.hashes()) == sorted(named(1, 2, 8, 9))
    close(tier)
    again = make()
    again.drop(named(2))
    assert again.hashes() == named(9)


def test_a_disk_that_takes_nothing_costs_nothing_else(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make()
    write(tier, 1)

    def full(*_: Any) -> Any:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(files, "write", full)
        assert write(tier, 2) == 0
    assert read(tier, 1) is None
    assert write(tier, 2) == 1


def test_what_waits_is_bounded(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, go = make(), threading.Event()
    really = files.write

    def hung(*how: Any) -> Any:
        go.wait(10)
        return really(*how)

    monkeypatch.setattr(files, "write", hung)
    ended: list[int] = []
    taken = [tier.write(named(number), b"", holding(number), ended.append) for number in range(local.WRITES + 1)]
    assert taken == [True] * local.WRITES + [False]
    go.set()
    wait_for(lambda: len(ended) == local.WRITES)
    assert tier.write(named(99), b"", holding(99), ended.append)


def test_reads_that_wait_are_bounded_too(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, go = make(), threading.Event()
    write(tier, 1)
    really = files.read

    def hung(group: files.Group, first: int, blocks: Sequence[Any]) -> None:
        go.wait(10)
        really(group, first, blocks)

    monkeypatch.setattr(files, "read", hung)
    ended: list[Any] = []
    taken = [tier.read(named(1), holding(0), ended.append) for _ in range(local.READS + 1)]
    assert taken == [True] * local.READS + [False]
    go.set()
    wait_for(lambda: len(ended) == local.READS)
    assert ended == [None] * local.READS


def test_reading_takes_the_time_that_it_took(make: Any) -> None:
    tier = make()
    assert tier.seconds(10) == 10 * SIZE / read_rates.FIRST_RATE
    write(tier, *range(1, 20))
    read(tier, *range(1, 20))
    assert tier.seconds(10) != 10 * SIZE / read_rates.FIRST_RATE
