"""What clients send and what answers them is readable for the router's user alone, whatever the process's umask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.runtime.private_files import make_private, make_private_folder
from tests.batch_parts import api, ended

ROW = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 1}}\n'


@pytest.fixture(autouse=True)
def generous() -> Iterator[None]:
    """A umask that takes nothing away."""
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(root: Path) -> list[str]:
    return [str(path) for path in (root, *root.rglob("*")) if path.lstat().st_mode & 0o077 and not path.is_symlink()]


async def test_files_batches_and_their_folders(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    at = api(root)
    async with at.batches:
        sent = await at.http.post("/v1/files", files={"file": ("in.jsonl", ROW)}, data={"purpose": "batch"})
        body = {"input_file_id": sent.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = await at.http.post("/v1/batches", json=body)
        await ended(at, batch.json()["id"])
        await at.http.post(f"/v1/batches/{batch.json()['id']}/cancel")
    assert sum(path.is_file() for path in root.rglob("*")) >= 5
    assert open_to_others(tmp_path / "a") == []


async def test_what_an_older_release_left_open_is_closed_at_start(tmp_path: Path) -> None:
    at = api(tmp_path)
    old = tmp_path / "default" / "tenant" / "files"
    old.mkdir(parents=True)
    (old / "file-0.data").write_bytes(b"x")
    outside = tmp_path / "outside"
    outside.write_bytes(b"y")
    (old / "link").symlink_to(outside)
    async with at.batches:
        assert open_to_others(tmp_path / "default") == []
    assert outside.stat().st_mode & 0o777 == 0o666, "no link is followed"


def test_parents_that_are_there_stay_as_they_are(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    make_private_folder(tmp_path / "a" / "b")
    make_private_folder(tmp_path / "a" / "b")
    assert [path.stat().st_mode & 0o777 for path in (tmp_path, tmp_path / "a", tmp_path / "a" / "b")] == [
        0o755, 0o700, 0o700,
    ]  # fmt: skip
    make_private(tmp_path / "absent")
