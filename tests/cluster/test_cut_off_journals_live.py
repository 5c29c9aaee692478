"""A router that dies while Redis fails it: cut off, frozen or emptied. Another router takes up its streams."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.servers import free_port
from tests.chaos.redis_proxy import Ways
from tests.cluster.tiny_checkpoints import save_checkpoint
from tests.crowded import in_time
from tests.forked_process import ForkedProcess
from tests.forked_python import ROUTERS, forked_python
from tests.local_cluster import MODEL, LocalCluster, local_cluster
from tests.redis_servers import RedisServer, redis_server
from tests.resumed_streams import Heard, listen, resumed
from tests.waiting import wait_for

PATH, START_S, STEP_S, TOKENS = "/v1/completions", 60.0, 0.02, 200
RESUMED_S = 1.5
"""Longest time from the router's death to the first new event, in seconds: its lease, and few tokens that were not
recorded."""
BODY: dict[str, Any] = {
    "prompt": "Once upon a time", "max_tokens": TOKENS, "temperature": 1.0, "seed": 7, "ignore_eos": True
}  # fmt: skip


@dataclass
class Router:
    """A router process beside that of the cluster."""

    process: ForkedProcess
    url: str

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of routers and nodes."""
    folder = tmp_path_factory.mktemp("common")
    (folder / "secret").write_text("s" * 40)
    (folder / "secret").chmod(0o600)
    model = save_checkpoint(folder / "model", "LlamaConfig", num_attention_heads=2, max_position_embeddings=2048)
    return ["--model", str(model), "--served-model-name", MODEL, "--cluster-secret-file", str(folder / "secret")]


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture(scope="module")
def cluster(words: list[str], redis: RedisServer) -> Iterator[LocalCluster]:
    exact = ("--batch-invariant", "--dtype", "bfloat16", "--threads", "1", "--kv-blocks", "500")
    with local_cluster(*words, *exact, "--redis-url", f"redis://127.0.0.1:{redis.port}/0", step_s=STEP_S) as running:
        yield running


@pytest.fixture
def ways(redis: RedisServer) -> Iterator[Ways]:
    """The second router's way to Redis."""
    made = Ways(("router",), "127.0.0.1", redis.port)
    yield made
    made.close()


@pytest.fixture
def second(cluster: LocalCluster, ways: Ways, words: list[str], tmp_path: Path) -> Iterator[Router]:
    """A second router that knows the nodes."""
    url = f"http://127.0.0.1:{free_port()}"
    argv = ["-m", "kvferry.cli.main", "router", *words, "--port", url.rpartition(":")[2]]
    argv += ["--redis-url", f"redis://127.0.0.1:{ways.ports['router']}/0", "--data-dir", str(tmp_path / "data")]
    with (tmp_path / "log").open("wb") as log:
        process = forked_python(ROUTERS).start(argv, log.fileno(), log.fileno())
        try:

            def ready() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return bool(httpx.get(f"{url}/ready?nodes=1", timeout=2).json()["nodes"]["decode"])
                return False

            wait_for(ready, START_S)
            yield Router(process, url)
        finally:
            process.kill()
            process.wait(10)


def text(cluster: LocalCluster) -> dict[int, str]:
    """Return the text of an undisturbed stream."""
    undisturbed = Heard()
    listen(undisturbed, cluster.url, PATH, BODY)
    return undisturbed.texts()


def taken_up(heard: Heard, cluster: LocalCluster) -> float:
    """Take a broken stream up at the cluster's router; return the seconds until its first event there."""
    seen, began = len(heard.events), time.monotonic()
    resumed_after: list[float] = []

    def first() -> None:
        resumed_after.append(time.monotonic() - began)

    while not heard.is_whole and not resumed_after:
        status = listen(heard, cluster.url, PATH, BODY, events=seen + 1, then=first, last_event_id=heard.last_id)
        assert status in (200, 503)
    resumed(heard, cluster.url, PATH, BODY)
    return resumed_after[0]


@pytest.mark.parametrize("deed", ["cut", "freeze"])
def test_a_stream_that_began_and_broke_while_its_router_was_cut_off(
    cluster: LocalCluster, ways: Ways, second: Router, deed: str
) -> None:
    """It was recorded in that router's memory alone, and began anew."""
    undisturbed, heard = text(cluster), Heard()
    ways.order("router", deed)
    listen(heard, second.url, PATH, BODY, events=100, then=second.kill)
    assert not heard.is_whole
    assert in_time(taken_up(heard, cluster), RESUMED_S)
    assert heard.texts() == undisturbed


def test_a_stream_whose_router_dies_a_second_after_redis_has_lost_its_data(
    cluster: LocalCluster, redis: RedisServer, second: Router
) -> None:
    """Its journal was gone, and its client began anew."""
    undisturbed, heard = text(cluster), Heard()

    def emptied() -> None:
        redis.kill()
        redis.start()
        threading.Timer(1.0, second.kill).start()

    listen(heard, second.url, PATH, BODY, events=60, then=emptied)
    assert not heard.is_whole
    assert in_time(taken_up(heard, cluster), RESUMED_S)
    assert heard.texts() == undisturbed
