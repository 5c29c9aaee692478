"""Files and batches: kept on disk, answered by the same application, resumed after a restart."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import cast

import pytest

from kvferry.protocol.errors import NoNodes
from kvferry.protocol.settings import RouterSettings
from kvferry.router.batch.batches import Batches
from kvferry.router.batch.disk_store import DiskFiles
from kvferry.router.batch.held_folder import complete_bytes, ids_of
from kvferry.router.batch.rows import answer_row
from kvferry.router.batch.runner import PRIORITY
from kvferry.router.tenants.keys import entry
from kvferry.router.tenants.tenant_registry import TenantRegistry
from kvferry.runtime import watched_file
from tests.api_parts import FakeCluster, error_of, says
from tests.batch_parts import CHAT, api, begin, chat, ended, kept, output, rows, upload
from tests.waiting import until


async def test_a_file_is_kept_listed_read_and_deleted(tmp_path: Path) -> None:
    at = api(tmp_path)
    made = (await upload(at, b"{}\n")).json()
    assert (made["bytes"], made["filename"], made["purpose"]) == (3, "in.jsonl", "batch")
    assert (await at.http.get(f"/v1/files/{made['id']}")).json() == made
    assert (await at.http.get("/v1/files")).json()["data"] == [made]
    assert (await at.http.get(f"/v1/files/{made['id']}/content")).content == b"{}\n"
    assert (await at.http.delete(f"/v1/files/{made['id']}")).json()["deleted"]
    for path in (f"/v1/files/{made['id']}", f"/v1/files/{made['id']}/content"):
        assert (await at.http.get(path)).status_code == 404
    assert not kept(tmp_path, "file-*")


async def test_pages_of_files(tmp_path: Path) -> None:
    at = api(tmp_path)
    for _ in range(3):
        await upload(at, b"{}")
    everything = (await at.http.get("/v1/files")).json()["data"]
    first = (await at.http.get("/v1/files", params={"limit": 2})).json()
    assert first["has_more"]
    rest = (await at.http.get("/v1/files", params={"after": first["last_id"]})).json()
    assert first["data"] + rest["data"] == everything
    assert not rest["has_more"]
    for wrong in ({"limit": "0"}, {"limit": "many"}, {"order": "up"}, {"purpose": "fun"}):
        response = await at.http.get("/v1/files", params=wrong)
        assert error_of(response)["param"] == next(iter(wrong))


async def test_what_is_no_upload_is_refused(tmp_path: Path) -> None:
    at = api(tmp_path, files_mib=1)
    assert error_of(await upload(at, b"{}", purpose="assistants"))["param"] == "purpose"
    assert error_of(await at.http.post("/v1/files", data={"purpose": "batch"}, files={"other": b""}))["param"] == "file"
    assert (await at.http.post("/v1/files", json={})).status_code == 400
    form = {"content-type": "multipart/form-data; boundary=x"}
    assert (await at.http.post("/v1/files", content=b"--x\r\nbroken", headers=form)).status_code == 400
    assert (await upload(at, b"x" * 2**20)).status_code == 413
    assert (await upload(at, b"x" * 700_000)).status_code == 200
    refused = await upload(at, b"x" * 700_000)
    assert refused.status_code == 413
    assert "delete files" in error_of(refused)["message"]
    assert len(kept(tmp_path, "*.data")) == 1


@pytest.mark.parametrize("name", ["../../etc/passwd", "file-" + "0" * 32, "file-x", "..%2F..%2Fx", "file-\x00"])
async def test_no_name_leaves_the_folder(tmp_path: Path, name: str) -> None:
    at = api(tmp_path)
    assert (await at.http.get(f"/v1/files/{name.replace(chr(0), '%00')}")).status_code == 404
    assert (await at.http.delete(f"/v1/batches/{name.replace(chr(0), '%00')}")).status_code in (404, 405)


async def test_a_batch_is_answered(tmp_path: Path) -> None:
    at = api(tmp_path)
    begun = await begin(at, rows(chat("a"), chat("b", temperature=-1), chat("c")), metadata={"k": "v"})
    assert begun["status"] == "validating"
    batch = await ended(at, begun["id"])
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert batch["metadata"] == {"k": "v"}
    assert [row["custom_id"] for row in await output(at, batch["output_file_id"])] == ["r0", "r2"]
    (wrong,) = await output(at, batch["error_file_id"])
    assert wrong["response"]["status_code"] == 400
    assert wrong["response"]["body"]["error"]["param"] == "temperature"
    good = (await output(at, batch["output_file_id"]))[0]["response"]
    assert good["body"]["choices"][0]["message"]["content"] == "Yes."
    assert {dispatch.spec.call.priority for dispatch in at.cluster.dispatches} == {PRIORITY}
    assert (await at.http.get("/v1/batches")).json()["data"] == [batch]
    assert not kept(tmp_path, "*.jsonl")


async def test_lines_at_fault_are_named(tmp_path: Path) -> None:
    at = api(tmp_path)
    good = rows(chat("a"))
    lines = [good, b"{", b"[]", good, b'{"custom_id": "x", "method": "GET"}', rows(chat("b"), url="/v1/other"), b""]
    batch = await ended(at, (await begin(at, b"\n".join(lines)))["id"])
    assert batch["status"] == "failed"
    told = [(error["line"], error["code"]) for error in batch["errors"]["data"]]
    assert told == [
        (2, "invalid_json_line"), (3, "invalid_request"), (4, "duplicate_custom_id"), (5, "invalid_method"),
        (6, "mismatched_url"),
    ]  # fmt: skip
    assert not at.cluster.dispatches


async def test_an_empty_file_and_streams_fail(tmp_path: Path) -> None:
    at = api(tmp_path)
    for content in (b"\n\n", rows(chat("a", stream=True))):
        assert (await ended(at, (await begin(at, content))["id"]))["status"] == "failed"


async def test_wrong_batches_are_refused(tmp_path: Path) -> None:
    at = api(tmp_path)
    file_id = (await upload(at, rows(chat("a")))).json()["id"]
    good = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    for field, value, status in (
        ("input_file_id", "file-none", 404), ("endpoint", "/v1/nothing", 400), ("completion_window", "1h", 400),
        ("metadata", {"a": 1}, 400),
    ):  # fmt: skip
        response = await at.http.post("/v1/batches", json={**good, field: value})
        assert response.status_code == status
        assert error_of(response)["param"].startswith(field)
    assert (await at.http.get("/v1/batches/batch_x")).status_code == 404
    assert (await at.http.post("/v1/batches/batch_x/cancel")).status_code == 404


async def test_cancelling_keeps_what_was_answered(tmp_path: Path) -> None:
    cluster = FakeCluster(says("one two three four five"), gap_s=0.05)
    at = api(tmp_path, cluster, batch_rows=2)
    begun = await begin(at, rows(*(chat(str(i)) for i in range(50))))
    await until(lambda: kept(tmp_path, "output.jsonl"))
    assert (await at.http.post(f"/v1/batches/{begun['id']}/cancel")).json()["status"] == "cancelling"
    batch = await ended(at, begun["id"])
    assert batch["status"] == "cancelled"
    assert len(await output(at, batch["output_file_id"])) == batch["request_counts"]["completed"] < 50
    response = await at.http.post(f"/v1/batches/{begun['id']}/cancel")
    assert error_of(response)["param"] == "batch_id"


async def test_no_more_rows_run_than_allowed_and_live_requests_come_first(tmp_path: Path) -> None:
    cluster = FakeCluster(says("one two three"), gap_s=0.02)
    at = api(tmp_path, cluster, batch_rows=3)
    begun = await begin(at, rows(*(chat(str(i)) for i in range(12))))
    most = 0
    while (await at.http.get(f"/v1/batches/{begun['id']}")).json()["status"] != "completed":
        most = max(most, sum(dispatch.yielded < 4 for dispatch in cluster.dispatches))
        await asyncio.sleep(0.01)
    assert 1 < most <= 3


async def test_rows_wait_while_no_node_can_take_them(tmp_path: Path) -> None:
    cluster = FakeCluster(says("Yes."))
    cluster.refusal = NoNodes("no node yet", retry_after=0.1)
    at = api(tmp_path, cluster)
    begun = await begin(at, rows(chat("a")))
    await asyncio.sleep(0.3)
    assert (await at.http.get(f"/v1/batches/{begun['id']}")).json()["status"] == "in_progress"
    cluster.refusal = None
    assert (await ended(at, begun["id"]))["request_counts"]["completed"] == 1


async def test_a_restart_goes_on_where_it_stopped(tmp_path: Path) -> None:
    slow = api(tmp_path, FakeCluster(says("one two three four"), gap_s=0.05), batch_rows=2)
    async with slow.batches:
        begun = await begin(slow, rows(*(chat(str(i)) for i in range(8))))
        await until(lambda: len(slow.cluster.dispatches) >= 4)
    started = len(slow.cluster.dispatches)
    after = api(tmp_path, FakeCluster(says("Yes.")))
    stopped = (await after.http.get(f"/v1/batches/{begun['id']}")).json()
    assert stopped["status"] == "in_progress"
    async with after.batches:
        batch = await ended(after, begun["id"])
    assert batch["request_counts"] == {"total": 8, "completed": 8, "failed": 0}
    found = await output(after, batch["output_file_id"])
    assert [row["custom_id"] for row in found] == [f"r{i}" for i in range(8)]
    assert 8 - started <= len(after.cluster.dispatches) < 8


async def test_one_router_runs_a_batch_that_two_know(tmp_path: Path) -> None:
    at = api(tmp_path, FakeCluster(says("one two three four"), gap_s=0.02))
    begun = await begin(at, rows(*(chat(str(i)) for i in range(6))))
    await until(lambda: at.cluster.dispatches)
    beside = api(tmp_path)
    async with beside.batches:
        assert (await ended(beside, begun["id"]))["status"] == "completed"
    assert not beside.cluster.dispatches


async def test_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.router.batch.batch.WINDOW_S", -1)
    at = api(tmp_path)
    batch = await ended(at, (await begin(at, rows(chat("a"), chat("b"))))["id"])
    assert batch["status"] == "expired"
    assert {row["error"]["code"] for row in await output(at, batch["error_file_id"])} == {"batch_expired"}


def test_a_line_that_broke_off_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "output.jsonl"
    whole = json.dumps(answer_row("a", 200, "id", {})) + "\n"
    path.write_text(whole + '{"custom_id": "b", "resp')
    assert complete_bytes(path) == len(whole)
    assert list(ids_of(path, len(whole))) == ["a"]


def test_tenants_do_not_see_each_other(tmp_path: Path) -> None:
    batches = Batches(RouterSettings(data_dir=str(tmp_path)))
    files = [batches.files(tenant) for tenant in ("", "a", "b", "../a", "default")]
    assert len({each.store.folder for each in files if isinstance(each, DiskFiles)}) == 5


async def test_the_batch_of_a_removed_tenant_stops_and_goes_on_when_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_file, "POLL_S", 0.01)
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("acme", "k") + entry("other", "o"))
    cluster = FakeCluster(says("one two three four"), gap_s=0.05)
    at = api(tmp_path / "data", cluster, api_keys=str(keys), batch_rows=2)
    at.http.headers["authorization"] = "Bearer k"
    registry = cast("TenantRegistry", at.batches._exists.__self__)  # type: ignore[attr-defined]
    async with registry.keyring.followed(), at.batches:
        begun = await begin(at, rows(*(chat(str(number)) for number in range(40))))
        await until(lambda: len(cluster.dispatches) >= 4)
        keys.write_text(entry("other", "o"))
        await until(lambda: not registry.exists("acme"))
        await asyncio.sleep(1.0)
        asked = len(cluster.dispatches)
        await asyncio.sleep(0.5)
        assert len(cluster.dispatches) == asked < 40
        assert kept(tmp_path / "data", "file-*.data"), "its files stay"
        keys.write_text(entry("acme", "k") + entry("other", "o"))
        await until(lambda: registry.exists("acme"))
        assert (await ended(at, begun["id"]))["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
