"""What befalls a disk, and what was wrong before it was written: nothing hangs, nothing wrong comes back."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.kv_transfer.tiers import disk_directories, files
from kvferry.kv_transfer.tiers.disk import open_disk
from kvferry.protocol.errors import BlocksCorrupt, ConfigError, TransferFailed
from tests.kv_transfer.tiers.test_disk_tier import SIZE, close, dropped, file_size, holding, make, named, read, write
from tests.kv_transfer.tiers.told import Overtaken
from tests.waiting import wait_for

__all__ = ["dropped", "make"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BLOCKS", 2)


def failing(number: int) -> Callable[..., None]:
    """A call to the system that ends with this error."""

    def call(*how: Any, **more: Any) -> None:
        raise OSError(number, os.strerror(number))

    return call


def test_of_a_chain_the_end_leaves_before_the_beginning(make: Any, dropped: list[bytes]) -> None:
    """Else what is left is of no use, and an index that takes it for whole tells wrong lengths."""
    tier = make(size=4 * file_size(2))
    write(tier, 1, 2, 3, 4, 5, 6)
    write(tier, 7, 8)
    write(tier, 9, 10)
    assert dropped == named(5, 6)
    assert read(tier, 3, 4) is None
    write(tier, 11, 12)
    assert dropped == named(5, 6, 7, 8)


def test_also_after_a_restart(make: Any, dropped: list[bytes]) -> None:
    tier = make()
    write(tier, 1, 2, 3, 4, 5, 6)
    for age, number in enumerate((2, 4, 6)):
        path = tier.directory / f"{named(number)[0].hex()}.kv"
        os.utime(path, ns=(0, 10**9 * age))
    close(tier)
    again = make(size=2 * file_size(2))
    assert sorted(again.hashes()) == sorted(named(1, 2, 3, 4))


def test_a_chain_that_is_longer_than_the_tier_keeps_its_beginning(make: Any) -> None:
    tier = make(size=2 * file_size(2))
    assert write(tier, *range(1, 9)) == 4
    assert sorted(tier.hashes()) == sorted(named(1, 2, 3, 4))
    assert write(tier, 9, behind=8) == 0


def test_nobody_waits_for_a_file_that_is_removed(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine asks what is here: where it waited for a disk that hangs, its process would be ended."""
    tier, go, begun = make(size=file_size(2)), threading.Event(), threading.Event()
    write(tier, 1, 2)
    really = Path.unlink

    def unlink(path: Path, **how: Any) -> None:
        begun.set()
        go.wait(10)
        really(path, **how)

    ended: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink)
        tier.write(named(3, 4), b"", holding(3, 4), ended.append)
        assert begun.wait(10)
        asked: list[Any] = []
        asking = threading.Thread(target=lambda: asked.append((tier.run(named(1)), tier.drop(named(9)))))
        asking.start()
        asking.join(5)
        assert asked == [(0, None)]
        go.set()
        wait_for(lambda: ended == [2])


def test_what_is_said_to_be_wrong_while_it_is_written_is_not_kept(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, go, begun, really = make(), threading.Event(), threading.Event(), files.write

    def slow(*how: Any) -> Any:
        begun.set()
        go.wait(10)
        return really(*how)

    monkeypatch.setattr(files, "write", slow)
    ended: list[int] = []
    tier.write(named(1, 2), b"", holding(1, 2), ended.append)
    tier.write(named(3, 4), named(2)[0], holding(3, 4), ended.append)
    tier.write(named(5), b"", holding(5), ended.append)
    assert begun.wait(10)
    tier.drop(named(2))
    go.set()
    wait_for(lambda: len(ended) == 3)
    assert ended == [0, 0, 1]
    assert tier.hashes() == named(5)
    wait_for(lambda: len(list(tier.directory.glob("*.kv"))) == 1)


def test_what_is_told_last_is_how_it_is(make: Any) -> None:
    """Else an index would have a row, for as long as it lives, of what was said to be wrong as it was told of."""
    tier = make()
    hearing = Overtaken(lambda: tier.drop(named(1)))
    tier.changed = hearing.changed
    write(tier, 1)
    assert (hearing.ended(), tier.hashes()) == (["here", "gone"], [])


def test_a_file_that_replaces_another_of_its_name_is_told_of(make: Any, dropped: list[bytes]) -> None:
    tier = make()
    write(tier, 1, 2)
    write(tier, 2, behind=1)
    assert sorted(dropped) == named(1, 2)
    assert (tier.hashes(), tier.rows()) == (named(2), []), "nothing is before it"
    assert tier.used == sum(path.stat().st_size for path in tier.directory.glob("*.kv"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_where_the_disk_is_full_before_its_time_the_oldest_makes_room(
    make: Any, dropped: list[bytes], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    tier, really = make(), files.write
    write(tier, 1, 2)
    write(tier, 3, 4)

    def full(directory: Path, *how: Any) -> Any:
        if len(list(directory.glob("*.kv"))) > 1:
            raise OSError(number, os.strerror(number))
        return really(directory, *how)

    monkeypatch.setattr(files, "write", full)
    assert write(tier, 5, 6) == 2
    assert dropped == named(1, 2)


def test_a_full_disk_from_which_nothing_can_be_removed_keeps_what_it_has(
    make: Any, dropped: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """File systems that copy what they change may be too full to remove: each write took blocks out for nothing."""
    tier = make()
    for number in (1, 3, 5):
        write(tier, number, number + 1)

    full = failing(errno.ENOSPC)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", full)
        patched.setattr(files, "write", full)
        assert [write(tier, number) for number in (7, 8, 9)] == [0, 0, 0]
        assert dropped == named(1, 2)
    assert (write(tier, 7), read(tier, 5, 6)) == (1, None)


def test_what_cannot_be_removed_takes_its_room_until_it_is(
    make: Any, dropped: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a disk fills beyond its bound, and what was said to be wrong is found again after a restart."""
    tier = make(size=3 * file_size(2))
    for number in (1, 3, 5):
        write(tier, number, number + 1)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", failing(errno.EIO))
        tier.drop(named(3))
        assert write(tier, 7, 8) == 0, "there is room for three"
    assert (write(tier, 9, 10), write(tier, 11, 12)) == (2, 2)
    there = list(tier.directory.glob("*.kv"))
    assert tier.used == sum(path.stat().st_size for path in there) == 3 * file_size(2)
    close(tier)
    assert named(3)[0] not in make()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.ENOTCONN])
def test_what_is_not_the_files_fault_does_not_remove_it(
    make: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    tier = make()
    write(tier, 1, 2)

    def poor(*how: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(files, "read", poor)
        assert isinstance(read(tier, 1, 2), TransferFailed)
    assert read(tier, 1, 2) is None


def test_a_disk_that_may_only_be_read_is_read(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make()
    write(tier, 1, 2)

    def refused(*how: Any, **more: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refused)
    assert read(tier, 1, 2) is None
    assert read(tier, 1, 2) is None


def test_a_directory_that_was_removed_costs_what_was_in_it(make: Any, dropped: list[bytes]) -> None:
    tier = make()
    write(tier, 1, 2)
    for path in tier.directory.iterdir():
        path.unlink()
    tier.directory.rmdir()
    assert isinstance(read(tier, 1, 2), TransferFailed)
    assert (dropped, tier.used, write(tier, 3)) == (named(1, 2), 0, 0)


def test_what_is_no_file_does_not_keep_a_node_from_starting(make: Any, tmp_path: Path) -> None:
    tier = make()
    write(tier, 1, 2)
    close(tier)
    (tmp_path / "other").write_bytes(b"not ours")
    (tier.directory / "00.kv").symlink_to(tmp_path / "nowhere")
    (tier.directory / "01.kv").symlink_to(tmp_path / "other")
    (tier.directory / "02.kv").mkdir()
    (tier.directory / "03.part").mkdir()
    os.mkfifo(tier.directory / "04.kv")
    (tier.directory / "05.kv").write_bytes(b"")
    with (tier.directory / "06.kv").open("wb") as huge:
        huge.truncate(1 << 40)
    again = make()
    assert again.hashes() == named(1, 2)
    assert (tmp_path / "other").read_bytes() == b"not ours"
    assert not (tier.directory / "06.kv").exists()


def test_files_are_their_owners_alone(make: Any) -> None:
    tier = make()
    write(tier, 1)
    modes = [path.stat().st_mode & 0o777 for path in (tier.directory.parent, tier.directory, *tier.directory.iterdir())]
    assert [mode & 0o077 for mode in modes] == [0] * 4


def test_a_directory_that_others_may_use_is_closed_to_them(make: Any) -> None:
    tier = make()
    close(tier)
    tier.directory.chmod(0o770)
    again = make()
    assert again.directory.stat().st_mode & 0o777 == 0o700


def test_a_link_is_not_taken_for_a_directory(make: Any, tmp_path: Path) -> None:
    tier = make()
    close(tier)
    (tier.directory / disk_directories.LOCK).unlink()
    tier.directory.rmdir()
    (tmp_path / "elsewhere").mkdir()
    tier.directory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="or is a symbolic link"):
        open_disk(str(tmp_path), "prefill", 1 << 30, "model", SIZE)


def test_a_directory_that_another_process_is_removing_is_not_taken(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    really, removed = fcntl.flock, list[str]()

    def flock(file: Any, how: int) -> None:
        if not removed:
            removed.append(os.readlink(f"/proc/self/fd/{file.fileno()}"))
            os.unlink(removed[0])
        really(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert str(make().directory) != os.path.dirname(removed[0])


def test_the_directory_is_not_free_while_a_thread_still_writes(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, go, begun, really = make(), threading.Event(), threading.Event(), files.write

    def slow(*how: Any) -> Any:
        begun.set()
        go.wait(10)
        return really(*how)

    with monkeypatch.context() as patched:
        patched.setattr(files, "write", slow)
        tier.write(named(1), b"", holding(1), lambda written: None)
        assert begun.wait(10)
        tier.close()
        assert make().directory != tier.directory
        go.set()
        wait_for(lambda: tier._lock_file.closed)
    assert make().hashes() == named(1)


def test_what_another_model_left_long_ago_is_removed(make: Any) -> None:
    old, lately, ours = make(fingerprint="old"), make(fingerprint="lately"), make()
    for tier in (old, lately):
        write(tier, 1)
        close(tier)
    for path in (old.directory / disk_directories.LOCK, old.directory):
        os.utime(path, (0, 0))
    make(name="decode")
    assert not old.directory.exists()
    assert not old.directory.parent.exists()
    assert lately.directory.exists()
    assert ours.directory.exists()


def test_what_was_only_read_of_late_is_not_taken_for_left(make: Any) -> None:
    old = make(fingerprint="old")
    close(old)
    for path in (old.directory / disk_directories.LOCK, old.directory):
        os.utime(path, (0, 0))
    close(make(fingerprint="old"))
    make()
    assert old.directory.exists()


def test_headers_that_follow_each_other_in_a_circle_are_looked_at_once(make: Any) -> None:
    tier = make()
    for number, parent in ((1, 2), (2, 1), (3, 3)):
        files.write(tier.directory, "model", named(number), named(parent)[0], holding(number))
    close(tier)
    again = make()
    assert read(again, 1) is None
    assert read(again, 3) is None
    again.drop(named(1))
    assert again.hashes() == named(3)


def test_one_read_that_hung_is_not_the_last(make: Any) -> None:
    tier, now = make(), [time.monotonic()]
    pace = tier._pace
    pace._clock = lambda: now[0]
    first = tier.block_s
    pace.enqueue(8)
    assert tier.seconds(1) == 9 * first
    pace.ended(8, 60.0)
    assert tier.block_s > 100 * first
    now[0] += 1000.0
    assert tier.block_s < 2 * first
    pace.enqueue(256)
    pace.ended(256, 256 * first / 10)
    assert first / 10 < tier.block_s < first


def test_a_disk_that_does_not_answer_is_told_as_none(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, go, begun, really, now = make(), threading.Event(), threading.Event(), files.read, [time.monotonic()]
    tier._pace._clock = lambda: now[0]
    write(tier, 1, 2)

    def slow(*how: Any) -> None:
        begun.set()
        go.wait(10)
        really(*how)

    monkeypatch.setattr(files, "read", slow)
    ended: list[Any] = []
    tier.read(named(1, 2), holding(0, 0), ended.append)
    assert begun.wait(10)
    assert tier.block_s > 0
    now[0] += 6.0
    assert tier.block_s == 0
    go.set()
    wait_for(lambda: ended == [None])
    assert tier.block_s > 0


def test_what_is_not_ours_stays_where_another_models_files_are_removed(make: Any) -> None:
    old = make(fingerprint="old")
    write(old, 1)
    close(old)
    (old.directory / "notes.txt").write_text("mine")
    for path in (old.directory / disk_directories.LOCK, old.directory):
        os.utime(path, (0, 0))
    make()
    assert [path.name for path in old.directory.iterdir()] == ["notes.txt"]


def test_a_header_that_is_damaged_is_no_file(make: Any) -> None:
    tier = make()
    write(tier, 1, 2)
    (path,) = tier.directory.glob("*.kv")
    path.write_bytes(path.read_bytes()[:-1])
    assert isinstance(read(tier, 1, 2), BlocksCorrupt)
