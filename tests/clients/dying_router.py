"""Two routers of a tiny model behind a gateway; a client's check has one of them killed while it waits for tokens."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.cluster.tiny_checkpoints import save_checkpoint
from tests.local_cluster import MODEL, LocalCluster, local_cluster, scrape, value
from tests.resumed_streams import Gateway, free_pair
from tests.waiting import wait_for

TOKENS = 600
"""Tokens of an answer: three seconds of paced steps."""
STEP_S, TOKEN_S = 0.005, 0.002
"""Seconds that a step lasts at least, and for each token of a prompt."""
BEFORE = 200
"""Tokens delivered before a router is killed: half of them are recorded by then, and most are left."""
SIZES = {"CHECK_DYING_TOKENS": str(TOKENS), "CHECK_DYING_BEFORE": str(BEFORE)}
EXACT = ("--batch-invariant", "--dtype", "bfloat16", "--threads", "1", "--kv-blocks", "1000", "--prefill", "0")
"""Options of nodes: other sums would decide near ties otherwise."""


class Victim:
    """The router that the gateway prefers, which the cluster starts anew after each death, and the one that stays."""

    def __init__(self, cluster: LocalCluster, port: int) -> None:
        self._cluster, self._port, self._url = cluster, port, f"http://127.0.0.1:{port}"
        self._before: dict[str, Counts] = {}

    def ready(self) -> int:
        """Wait until both routers serve and nothing runs; count from here on."""
        wait_for(self._serves, 60)
        self._cluster.settle()
        self._before = {url: counts(url) for url in (self._cluster.url, self._url)}
        return 0

    def kill(self) -> int:
        """Kill it in the middle of an answer."""
        wait_for(lambda: counts(self._url).tokens >= self._before[self._url].tokens + BEFORE, 30)
        return self._kill()

    def kill_early(self) -> int:
        """Kill it as soon as it has a request."""
        wait_for(lambda: value(scrape(self._url), "kvferry_requests_inflight") > 0, 30)
        return self._kill()

    def tokens(self) -> int:
        """Return the tokens that routers delivered since `ready`, without those of the dead one."""
        return int(sum(now.tokens - before.tokens for before, now in self._counted()))

    def takeovers(self) -> int:
        """Return how many requests of a dead router went on since `ready`."""
        return int(sum(now.takeovers - before.takeovers for before, now in self._counted()))

    def _counted(self) -> list[tuple[Counts, Counts]]:
        wait_for(self._serves, 60)
        self._cluster.settle()
        return [(before, counts(url)) for url, before in self._before.items()]

    def _serves(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self._url}/ready?nodes=1", timeout=2).status_code == 200
        return False

    def _kill(self) -> int:
        (process,) = (each for each in self._cluster.children("router") if str(self._port) in each.cmdline())
        process.kill()
        process.wait(10)
        self._before[self._url] = Counts(0, 0)
        return 0


class Counts(NamedTuple):
    """Of one router process: tokens delivered, and requests taken over."""

    tokens: float
    takeovers: float


def counts(url: str) -> Counts:
    found = scrape(url)
    return Counts(value(found, "kvferry_output_tokens_total"), value(found, "kvferry_takeovers_total"))


@contextlib.contextmanager
def dying_router(folder: Path) -> Iterator[dict[str, str]]:
    """Serve the gateway; yields the variables of checks: its URL, and another one that does what a path names."""
    path = save_checkpoint(folder, "LlamaConfig", num_attention_heads=2, max_position_embeddings=2048)
    port = free_pair()
    words = ("--routers", "2", "--port", str(port), "--model", str(path), "--served-model-name", MODEL, *EXACT)
    with local_cluster(*words, step_s=STEP_S, token_s=TOKEN_S) as cluster:
        victim = Victim(cluster, port + 1)
        gateway = Gateway(f"http://127.0.0.1:{port + 1}", cluster.url)
        done = (victim.ready, victim.kill, victim.kill_early, victim.tokens, victim.takeovers)
        commands = {f"/{each.__name__}": each for each in done}
        with contextlib.closing(gateway), _served(commands) as url:
            yield {"CHECK_DYING_URL": gateway.url, "CHECK_DYING_CONTROL": url, **SIZES}


@contextlib.contextmanager
def _served(commands: dict[str, Callable[[], int]]) -> Iterator[str]:
    """Serve each command under its path; a GET returns its number."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                status, said = 200, str(commands[self.path]())
            except Exception as error:
                status, said = 500, str(error)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(said.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
