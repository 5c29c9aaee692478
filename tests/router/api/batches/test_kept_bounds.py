"""What clients keep on disk has bounds, and what they keep waiting has deadlines."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import pytest

from kvferry.router.batch.batch import Batch
from kvferry.router.batch.batch_folder import BatchFolder
from kvferry.router.batch.files import FileStore, StoredFile
from kvferry.router.batch.rows import InvalidRow, Row, RowReader
from kvferry.router.tenants.keys import entry
from tests.api_parts import error_of
from tests.batch_parts import api, ended, kept

CHAT = "/v1/chat/completions"
FILE = {"file": ("in.jsonl", b"no json")}


async def test_files_have_a_number_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty ones would else be free."""
    monkeypatch.setattr("kvferry.router.batch.files.MAX_FILES", 2)
    at = api(tmp_path)
    answers = [await at.http.post("/v1/files", files=FILE, data={"purpose": "batch"}) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 413]
    assert "the limit is 2" in error_of(answers[2])["message"]


def test_room_is_counted_by_one_process_at_a_time(tmp_path: Path) -> None:
    files = FileStore(tmp_path, "", 100)
    files.add(BytesIO(b"x"), "one", "batch")
    command = ["flock", "-x", str(files.folder), "sh", "-c", "echo held; sleep 0.5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "held\n"
        began = time.monotonic()
        files.add(BytesIO(b"y"), "another", "batch")
        assert time.monotonic() - began > 0.3


async def test_two_that_arrive_together_do_not_share_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = FileStore.all

    def slowly(store: FileStore) -> list[StoredFile]:
        found = counted(store)
        time.sleep(0.1)
        return found

    monkeypatch.setattr(FileStore, "all", slowly)
    at = api(tmp_path, files_mib=1)
    big = {"file": ("in.jsonl", b"x" * 700_000)}
    answers = await asyncio.gather(*(at.http.post("/v1/files", files=big, data={"purpose": "batch"}) for _ in range(2)))
    assert sorted(answer.status_code for answer in answers) == [200, 413]


async def test_an_upload_that_does_not_come_gives_up_its_place(tmp_path: Path) -> None:
    at = api(tmp_path, request_timeout=0.3)

    async def never() -> AsyncIterator[bytes]:
        yield b"--b\r\n"
        await asyncio.sleep(60)

    headers = {"content-type": "multipart/form-data; boundary=b"}
    answer = await asyncio.wait_for(at.http.post("/v1/files", content=never(), headers=headers), 5)
    assert (answer.status_code, error_of(answer)["code"]) == (504, "deadline_exceeded")


async def test_uploads_together_take_no_more_than_a_tenants_room(tmp_path: Path) -> None:
    """Their bytes are reserved before they are read: what is spooled at once stays within the limit."""
    at, waiting = api(tmp_path, files_mib=1, request_timeout=3.0), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        yield b"x" * 600_000
        await waiting.wait()

    headers = {"content-type": "multipart/form-data; boundary=b"}
    first = asyncio.create_task(at.http.post("/v1/files", content=slow(), headers=headers))
    await asyncio.sleep(0.3)
    declared = await at.http.post("/v1/files", files={"file": ("a", b"x" * 600_000)}, data={"purpose": "batch"})
    chunked = await at.http.post("/v1/files", content=slow(), headers=headers)
    assert [declared.status_code, chunked.status_code] == [413, 413]
    assert "other uploads" in error_of(chunked)["message"]
    waiting.set()
    await first
    small = await at.http.post("/v1/files", files={"file": ("a", b"x" * 600_000)}, data={"purpose": "batch"})
    assert small.status_code == 200


async def test_slow_uploads_of_one_tenant_leave_places_to_others(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("slow", "s") + entry("other", "o"))
    at, waiting = api(tmp_path / "data", api_keys=str(keys), request_timeout=5.0), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"--b\r\n"
        await waiting.wait()

    headers = {"content-type": "multipart/form-data; boundary=b", "authorization": "Bearer s"}
    many = [asyncio.create_task(at.http.post("/v1/files", content=slow(), headers=headers)) for _ in range(10)]
    await asyncio.sleep(0.3)
    one = {"file": ("a", b"x")}
    other = await at.http.post("/v1/files", files=one, data={"purpose": "batch"}, headers={"authorization": "Bearer o"})
    own = await at.http.post("/v1/files", files=one, data={"purpose": "batch"}, headers={"authorization": "Bearer s"})
    assert (other.status_code, own.status_code) == (200, 429)
    waiting.set()
    await asyncio.gather(*many)


async def test_the_oldest_batches_that_ended_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.router.batch.batches.MAX_ENDED", 2)
    at = api(tmp_path)
    uploaded = await at.http.post("/v1/files", files=FILE, data={"purpose": "batch"})
    body = {"input_file_id": uploaded.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
    for _ in range(6):
        begun = (await at.http.post("/v1/batches", json=body)).json()
        assert (await ended(at, begun["id"]))["status"] == "failed"
    assert len((await at.http.get("/v1/batches")).json()["data"]) == 3
    assert len(kept(tmp_path, "batch_*")) == 3


def test_a_batch_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path)
    good, bad = (Batch.new(CHAT, "file-x", "", None) for _ in range(2))
    folder.create(good)
    folder.create(bad)
    (folder.folder(bad.id) / "batch.json").write_text("{}")
    assert folder.all() == [good]


def test_lines_without_end_and_without_bottom_are_at_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.router.batch.rows.MAX_ROW_BYTES", 300_000)
    row = b'{"custom_id": "a", "method": "POST", "url": "%s", "body": {}}' % CHAT.encode()
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"[" * 200_000 + b"\n" + row + b"\n" + b"x" * 400_000 + b"\n" + row)
    reader = RowReader(CHAT)
    deep, good, long = [*reader.feed(path.read_bytes()), *reader.end()]
    assert isinstance(deep, InvalidRow)
    assert (deep.line, deep.code) == (1, "invalid_json_line")
    assert isinstance(good, Row)
    assert isinstance(long, InvalidRow)
    assert (long.line, long.code) == (3, "line_too_long")


async def test_a_file_that_is_deleted_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    at = api(tmp_path)
    file_id = (await at.http.post("/v1/files", files=FILE, data={"purpose": "batch"})).json()["id"]
    opened = FileStore.open

    def then_deleted(store: FileStore, wanted: str) -> tuple[BinaryIO, int]:
        found = opened(store, wanted)
        store.delete(wanted)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileStore, "open", then_deleted)
        answer = await at.http.get(f"/v1/files/{file_id}/content")
    assert (answer.status_code, answer.content) == (200, b"no json")
    assert (await at.http.get(f"/v1/files/{file_id}/content")).status_code == 404
