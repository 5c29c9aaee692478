"""A model's revision depends on every byte of its weights, and a restart reads none of them again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kvferry.model_files.source import resolve
from kvferry.model_files.weight_digest import file_digest, kept_digest
from tests.file_mutants import metadata, write_directory, write_gguf

SIZE = 3 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvferry" / "digests"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(SIZE))
    return path


def flip(path: Path, place: int) -> None:
    """Changes a byte, and puts the time of the last change back."""
    state = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes((byte ^ 1,)))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


@pytest.mark.parametrize("place", [0, SIZE // 3, SIZE - 1])
def test_each_byte_counts_though_size_and_time_stay(weights: Path, place: int) -> None:
    before = file_digest(weights)
    flip(weights, place)
    assert file_digest(weights) != before
    flip(weights, place)
    assert file_digest(weights) == before


def test_a_version_of_a_file_is_read_once(weights: Path, cache: Path) -> None:
    digest = file_digest(weights)
    (kept,) = cache.iterdir()
    assert (kept.read_text(), kept.stat().st_mode & 0o077) == (digest, 0)
    kept.write_text("0" * 32)
    assert file_digest(weights) == "0" * 32, "it comes from there"
    kept.write_text("half of")
    assert file_digest(weights) == digest


def test_where_others_can_write_nothing_is_kept(weights: Path, cache: Path) -> None:
    digest = file_digest(weights)
    cache.chmod(0o777)
    for kept in cache.iterdir():
        kept.write_text("0" * 32)
    assert kept_digest(weights) is None
    assert file_digest(weights) == digest
    shutil.rmtree(cache.parent)
    cache.parent.write_text("no folder")
    assert file_digest(weights) == digest


def test_a_revision_depends_on_weights_in_the_middle_of_a_file(tmp_path: Path) -> None:
    directory, file = write_directory(tmp_path / "hf"), write_gguf(tmp_path / "model.gguf", metadata())
    for model, changed in ((directory, directory / "model.safetensors"), (file, file)):
        before = resolve(str(model)).revision
        assert len(before) == 32
        flip(changed, changed.stat().st_size - 777)
        assert resolve(str(model)).revision != before


def test_nothing_is_read_from_a_pipe_or_a_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="is not a regular file"):
            file_digest(path)
