"""Batches of a cluster with two router processes, each as on a machine of its own: one dies, hangs or drains in the
middle of a batch, and the other one goes on; Redis is restarted."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.lone_router import long_model, mocks
from benchmarks.mock_nodes import MODEL
from benchmarks.servers import free_port
from tests.crowded import in_time
from tests.forked_python import ROUTERS, forked_python
from tests.local_cluster import scrape, value
from tests.redis_servers import RedisServer, redis_server
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
START_S = 60.0
TAKEOVER_S = 2.0
ROWS, TOKENS = 60, 50
PACE_US = 20_000
"""Between two tokens of a row, in microseconds; the mock nodes take it as the seed."""


class Router:
    """A router process."""

    def __init__(self, words: list[str], log: Path) -> None:
        port = free_port()
        self.url, self.log = f"http://127.0.0.1:{port}", log
        with log.open("ab") as out:
            self.process = forked_python(ROUTERS).start([*words, "--port", str(port)], out.fileno(), out.fileno())
        self.http = httpx.Client(base_url=self.url, timeout=10)

    def ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(httpx.TransportError):
            return self.http.get("/ready?nodes=1").status_code == 200
        return False

    def batch(self, batch_id: str) -> dict[str, Any]:
        return dict(self.http.get(f"/v1/batches/{batch_id}").json())

    def answered(self, batch_id: str) -> int:
        return int(self.batch(batch_id)["request_counts"]["completed"])

    def has_resumed(self) -> bool:
        return value(scrape(self.url), "kvferry_batches_resumed_total") > 0

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(10)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    """It has everything again after it was killed and started."""
    with redis_server("--appendonly", "yes") as server, mocks(server.url):
        yield server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return long_model(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def two_routers(redis: RedisServer, model: Path, folder: Path, store: str) -> Iterator[tuple[Router, Router]]:
    words = [
        "-m",
        "kvferry.cli.main",
        "router",
        "--model",
        str(model),
        "--served-model-name",
        MODEL,
        "--redis-url",
        redis.url,
    ]
    words += ["--files-store", store, "--data-dir", str(folder / "data")]
    pair = Router(words, folder / "one.log"), Router(words, folder / "other.log")
    try:
        for router in pair:
            wait_for(router.ready, START_S)
        yield pair
    finally:
        for router in pair:
            router.end()


@pytest.fixture(params=["disk", "redis"])
def pair(
    request: pytest.FixtureRequest, redis: RedisServer, model: Path, tmp_path: Path
) -> Iterator[tuple[Router, Router]]:
    with two_routers(redis, model, tmp_path, request.param) as routers:
        yield routers


def begin(router: Router) -> str:
    body = {"model": MODEL, "max_tokens": TOKENS, "seed": PACE_US}
    rows = [
        {"custom_id": f"row-{i}", "method": "POST", "url": "/v1/completions", "body": body | {"prompt": "word " * i}}
        for i in range(1, ROWS + 1)
    ]
    content = "\n".join(map(json.dumps, rows)).encode()
    file = router.http.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return str(router.http.post("/v1/batches", json=asked).json()["id"])


def result(router: Router, batch_id: str) -> dict[str, Any]:
    """The answer of each row, of which the output has each once."""
    wait_for(lambda: router.batch(batch_id)["status"] == "completed", 60, lambda: router.batch(batch_id))
    batch = router.batch(batch_id)
    assert batch["request_counts"] == {"total": ROWS, "completed": ROWS, "failed": 0}
    lines = router.http.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    found = {row["custom_id"]: row["response"]["body"]["choices"] for row in map(json.loads, lines)}
    assert len(lines) == len(found) == ROWS
    return found


def right(router: Router) -> dict[str, Any]:
    """What an undisturbed run answers."""
    return result(router, begin(router))


def under_way(router: Router) -> str:
    """A batch that this router owns, a third of it answered."""
    batch_id = begin(router)
    wait_for(lambda: ROWS // 4 <= router.answered(batch_id) < ROWS - 16, 30)
    return batch_id


def test_a_killed_owners_batch_goes_on_at_the_other_router(pair: tuple[Router, Router]) -> None:
    one, other = pair
    expected = right(one)
    batch_id = under_way(one)
    one.signal(signal.SIGKILL)
    assert in_time(wait_for(other.has_resumed, 10), TAKEOVER_S + 0.5)
    assert result(other, batch_id) == expected


def test_a_hung_owner_that_wakes_up_doubles_no_row(pair: tuple[Router, Router]) -> None:
    one, other = pair
    batch_id = under_way(one)
    one.signal(signal.SIGSTOP)
    stopped = time.monotonic()
    assert in_time(wait_for(other.has_resumed, 10), TAKEOVER_S + 0.5)
    time.sleep(max(0.0, stopped + 5 - time.monotonic()))
    one.signal(signal.SIGCONT)
    found = result(other, batch_id)
    wait_for(lambda: "was taken over by another router" in one.log.read_text(), 10)
    time.sleep(1.0)
    assert result(one, batch_id) == result(other, batch_id) == found == right(other)
    files = one.http.get("/v1/files", params={"purpose": "batch_output"}).json()["data"]
    assert len([file for file in files if batch_id in file["filename"]]) == 1


def test_a_draining_owners_batch_goes_on_at_the_other_router(pair: tuple[Router, Router]) -> None:
    one, other = pair
    batch_id = under_way(one)
    one.signal(signal.SIGTERM)
    assert in_time(wait_for(other.has_resumed, 10, lambda: one.log.read_text() + other.log.read_text()), TAKEOVER_S)
    assert one.process.wait(20) == 0
    assert result(other, batch_id) == right(other)


def test_while_redis_is_restarted_rows_wait_and_go_on(redis: RedisServer, model: Path, tmp_path: Path) -> None:
    with two_routers(redis, model, tmp_path, "redis") as (one, other):
        batch_id = under_way(one)
        redis.kill()
        for router in (one, other):
            answer = router.http.get(f"/v1/batches/{batch_id}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "registry_unavailable")
        time.sleep(2.0)
        redis.start()
        wait_for(lambda: other.http.get("/v1/batches").status_code == 200, 20)
        assert result(other, batch_id) == result(one, batch_id) == right(other)
