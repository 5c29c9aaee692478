"""A file of blocks is whole and right, or it is not there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvferry.kv_transfer.tiers import block_header, files
from kvferry.protocol.errors import BlocksCorrupt

SIZE = 5000


def blocks(count: int, seed: int = 0) -> list[np.ndarray]:
    drawn = np.random.default_rng(seed).integers(0, 256, (count, SIZE), dtype=np.uint8)
    return list(drawn)


def hashes(count: int, first: int = 0) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in range(first, first + count)]


def found(directory: Path, fingerprint: str = "of this model", size: int = SIZE) -> list[files.Group]:
    return list(files.find(directory, fingerprint, size))


def test_what_was_written_is_found_and_read(tmp_path: Path) -> None:
    written = files.write(tmp_path, "of this model", hashes(5), b"", blocks(5))
    assert found(tmp_path) == [written]
    assert written.path.stat().st_size == written.size <= files.size_of("of this model", hashes(5), SIZE)
    into = [np.zeros(SIZE, np.uint8) for _ in range(2)]
    files.read(written, 2, into)
    assert [each.tobytes() for each in into] == [each.tobytes() for each in blocks(5)[2:4]]


@pytest.mark.parametrize("kind", [{"fingerprint": "of another model"}, {"size": SIZE - 1}])
def test_files_of_another_kind_are_not_taken_for_ours(tmp_path: Path, kind: dict[str, object]) -> None:
    files.write(tmp_path, "of this model", hashes(2), b"", blocks(2))
    assert found(tmp_path, **kind) == []  # type: ignore[arg-type]


def test_a_wrong_byte_is_found(tmp_path: Path) -> None:
    written = files.write(tmp_path, "of this model", hashes(3), b"", blocks(3))
    with written.path.open("r+b") as file:
        file.seek(written.start + SIZE + 17)
        file.write(bytes([blocks(3)[1][17] ^ 1]))
    files.read(written, 2, [np.zeros(SIZE, np.uint8)])
    with pytest.raises(BlocksCorrupt, match="block 1 of"):
        files.read(written, 0, [np.zeros(SIZE, np.uint8) for _ in range(3)])


def test_a_file_that_ends_early_is_found_when_it_is_read_and_removed_at_the_next_start(tmp_path: Path) -> None:
    written = files.write(tmp_path, "of this model", hashes(3), b"", blocks(3))
    with written.path.open("r+b") as file:
        file.truncate(written.size - 1)
    with pytest.raises(BlocksCorrupt, match="block 2 of"):
        files.read(written, 0, [np.zeros(SIZE, np.uint8) for _ in range(3)])
    assert found(tmp_path) == []
    assert not written.path.exists()


@pytest.mark.parametrize("cut", [0, 5, 11, 40, block_header.PAGE - 1])
def test_any_beginning_of_a_file_is_no_file(tmp_path: Path, cut: int) -> None:
    written = files.write(tmp_path, "of this model", hashes(3), b"", blocks(3))
    written.path.write_bytes(written.path.read_bytes()[:cut])
    assert found(tmp_path) == []


def test_whatever_stands_in_a_header_nothing_is_raised(tmp_path: Path) -> None:
    written = files.write(tmp_path, "of this model", hashes(3), b"", blocks(3))
    whole = written.path.read_bytes()
    random = np.random.default_rng(1)
    for _ in range(500):
        changed = bytearray(whole)
        for place in random.integers(0, 150, 1 + int(random.integers(4))):
            changed[place] = int(random.integers(256))
        written.path.write_bytes(changed)
        for group in found(tmp_path):
            assert (len(group.hashes), group.size) == (3, len(whole))


def test_what_was_being_written_when_the_process_was_killed_is_removed(tmp_path: Path) -> None:
    (tmp_path / "00.part").write_bytes(b"half")
    assert found(tmp_path) == []
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_of_what_could_not_be_written(tmp_path: Path) -> None:
    (tmp_path / (hashes(3)[-1].hex() + ".kv")).mkdir()
    with pytest.raises(OSError, match="directory"):
        files.write(tmp_path, "of this model", hashes(3), b"", blocks(3))
    assert not list(tmp_path.glob("*.part"))
