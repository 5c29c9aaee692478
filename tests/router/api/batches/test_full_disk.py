"""A disk without room: files and batches are refused with 507, and nothing of them stays."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import logging
import os
import shutil
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.router.batch import batch_folder, batches, disk_threads, runner
from kvferry.router.tenants.keys import entry
from kvferry.runtime import private_files
from tests.api_parts import Api, error_of
from tests.batch_parts import api, ended
from tests.crowded import in_time
from tests.waiting import until

FULL = Path("/dev/full")


async def upload(at: Api, content: bytes = b"{}\n") -> httpx.Response:
    return await at.http.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})


async def asked(at: Api, file_id: str) -> httpx.Response:
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    return await at.http.post("/v1/batches", json=body)


def below(folder: Path, pattern: str = "*") -> list[Path]:
    """Files, and folders whose names fit the pattern."""
    return [path for path in folder.rglob(pattern) if path.is_file() or pattern != "*"]


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def is_full(answer: httpx.Response) -> None:
    assert answer.status_code == 507
    error = error_of(answer)
    assert (error["type"], error["code"]) == ("server_error", "insufficient_storage")
    assert "No space left on device" in error["message"]


async def test_a_file_that_is_copied_to_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at, known = api(tmp_path), uuid.uuid4()
    kept = (await upload(at)).json()["id"]
    folder = below(tmp_path, f"{kept}.data")[0].parent
    (folder / f"file-{known.hex}.part").symlink_to(FULL)
    with monkeypatch.context() as patch:
        patch.setattr(uuid, "uuid4", lambda: known)
        is_full(await upload(at, b"{}\n" * 10_000))
    assert len(list(folder.iterdir())) == 2
    assert [file["id"] for file in (await at.http.get("/v1/files")).json()["data"]] == [kept]


async def test_a_file_whose_description_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = api(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        is_full(await upload(at))
    assert below(tmp_path) == []


async def test_a_file_that_does_not_even_fit_where_it_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer ones are kept on disk until they are whole."""

    def spooled(**options: Any) -> Any:
        return FULL.open("r+b", buffering=0)

    at = api(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", spooled)
        is_full(await upload(at, b"{}\n" * 2**20))
    assert (await upload(at)).status_code == 200


async def test_a_batch_that_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = api(tmp_path)
    file_id = (await upload(at)).json()["id"]
    with monkeypatch.context() as patch:
        patch.setattr(batch_folder.BatchFolder, "save", full)
        is_full(await asked(at, file_id))
    assert below(tmp_path, "batch_*") == []
    assert (await at.http.get("/v1/batches")).json()["data"] == []


async def test_another_failure_of_the_disk_is_a_500(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(tmp_path))

    at = api(tmp_path)
    monkeypatch.setattr(os, "fsync", broken)
    with caplog.at_level(logging.WARNING):
        answer = await upload(at)
    assert (answer.status_code, error_of(answer)["code"]) == (500, "storage_failed")
    assert str(tmp_path) not in answer.text, "where files are is the operator's business"
    assert f"'{tmp_path}'; --data-dir says where" in caplog.text


@pytest.mark.parametrize("at_what", ["an answer", "its end", "a file of answers"])
async def test_a_batch_waits_for_room_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at_what: str
) -> None:
    """Also the news of a failure would have no room. Whatever was written once is there once."""
    monkeypatch.setattr(batches, "FIRST_WAIT_S", 0.05)
    at, met = api(tmp_path), list[str]()
    row = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}
    rows = "\n".join(json.dumps({"custom_id": f"{i}", **row}) for i in range(3))
    file_id = (await upload(at, rows.encode())).json()["id"]
    with monkeypatch.context() as patch:
        write_whole = private_files.write_whole

        def write(path: Path, text: str) -> None:
            publishing = "output_file_id" in text and json.loads(text)["output_file_id"]
            if met or (at_what == "its end" and publishing):
                met.append(path.name)
                full()
            write_whole(path, text)

        def begin(*_: object) -> None:
            met.append("written")
            full()

        patch.setattr(batch_folder, "write_whole", write)
        if at_what == "an answer":
            patch.setattr(runner, "answer_row", begin)
        if at_what == "a file of answers":
            patch.setattr(shutil, "copyfileobj", begin)
        batch_id = (await asked(at, file_id)).json()["id"]
        await until(lambda: len(met) > 2)
        assert (await at.http.get(f"/v1/batches/{batch_id}")).json()["status"] in ("in_progress", "finalizing")
    done = await ended(at, batch_id)
    assert (done["status"], done["request_counts"]) == ("completed", {"total": 3, "completed": 3, "failed": 0})
    content = (await at.http.get(f"/v1/files/{done['output_file_id']}/content")).text
    assert sorted(json.loads(line)["custom_id"] for line in content.splitlines()) == ["0", "1", "2"]
    assert len((await at.http.get("/v1/files")).json()["data"]) == 2
    assert caplog.text.count("waits for the disk") == 1


async def test_a_folder_that_hangs_stops_no_other_tenant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a network file system does whose server is gone, or a lock that another process holds."""
    monkeypatch.setattr(disk_threads, "QUEUE_S", 0.2)
    monkeypatch.setattr(disk_threads, "CALL_LIMIT_S", 0.5)
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("hangs", "h") + entry("other", "o"))
    at = api(tmp_path / "data", api_keys=str(keys))
    mine, other = {"authorization": "Bearer h"}, {"authorization": "Bearer o"}
    at.http.headers.update(mine)
    assert (await upload(at)).status_code == 200
    (folder,) = {path.parent for path in below(tmp_path / "data", "*.data")}
    holder = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        stuck = [asyncio.create_task(upload(at)) for _ in range(disk_threads.PER_TENANT)]
        await asyncio.sleep(0.2)
        began = time.monotonic()
        listed = await at.http.get("/v1/files", headers=other)
        dashboard = await at.http.get("/dashboard/view", headers=other)
        assert (listed.status_code, dashboard.status_code) == (200, 200)
        assert in_time(time.monotonic() - began, 0.3), "the other tenant's and the dashboard's do not wait"
        refused = await at.http.get("/v1/files", headers=mine)
        assert (refused.status_code, error_of(refused)["code"]) == (500, "storage_failed")
        assert {answer.status_code for answer in await asyncio.gather(*stuck)} == {500}
    finally:
        os.close(holder)
    async with asyncio.timeout(15):
        while (await at.http.get("/v1/files", headers=mine)).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
