"""A router that is cut off from Redis records its streams through nodes: another router takes them up if it dies."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.servers import free_port
from tests.chaos.redis_proxy import Ways
from tests.cluster.tiny_checkpoints import save_checkpoint
from tests.crowded import in_time
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


@pytest.mark.parametrize("deed", ["cut", "freeze"])
def test_a_stream_that_began_and_broke_while_its_router_was_cut_off(
    cluster: LocalCluster, redis: RedisServer, words: list[str], tmp_path: Path, deed: str
) -> None:
    """It was recorded in that router's memory alone, and began anew."""
    undisturbed, heard = Heard(), Heard()
    listen(undisturbed, cluster.url, PATH, BODY)
    with contextlib.ExitStack() as stack:
        ways = Ways(("router",), "127.0.0.1", redis.port)
        stack.callback(ways.close)
        url = f"http://127.0.0.1:{free_port()}"
        argv = ["-m", "kvferry.cli.main", "router", *words, "--port", url.rpartition(":")[2]]
        argv += ["--redis-url", f"redis://127.0.0.1:{ways.ports['router']}/0", "--data-dir", str(tmp_path / "data")]
        log = stack.enter_context((tmp_path / "log").open("wb"))
        process = forked_python(ROUTERS).start(argv, log.fileno(), log.fileno())
        stack.callback(process.wait, 10)
        stack.callback(process.kill)

        def ready() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return bool(httpx.get(f"{url}/ready?nodes=1", timeout=2).json()["nodes"]["decode"])
            return False

        wait_for(ready, START_S)
        ways.order("router", deed)
        listen(heard, url, PATH, BODY, events=100, then=lambda: process.send_signal(signal.SIGKILL))
        assert not heard.is_whole
        seen, began = len(heard.events), time.monotonic()
        resumed_after: list[float] = []

        def first() -> None:
            resumed_after.append(time.monotonic() - began)

        while not heard.is_whole and not resumed_after:
            status = listen(heard, cluster.url, PATH, BODY, events=seen + 1, then=first, last_event_id=heard.last_id)
            assert status in (200, 503)
        resumed(heard, cluster.url, PATH, BODY)
        assert heard.texts() == undisturbed.texts()
        assert in_time(resumed_after[0], RESUMED_S)
