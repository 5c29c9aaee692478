"""Clients that leave in the middle of long steps: nothing of what they had asked for is computed for nobody."""

from __future__ import annotations

import json
import random
import socket
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import pytest

from tests.local_cluster import MODEL, LocalCluster, local_cluster, scrape, value
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG, SHORT = 2000, 20
CLIENTS, STORMS = 8, 3


def completion(tokens: int, seed: int) -> dict[str, object]:
    """On a prompt that shares nothing with others."""
    prompt = random.Random(seed).choices(range(1000, 40000), k=tokens)
    return {"model": MODEL, "prompt": prompt, "max_tokens": 2, "ignore_eos": True}


def complete(cluster: LocalCluster, body: dict[str, object]) -> None:
    assert httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120).status_code == 200


def ask(url: str, body: dict[str, object]) -> socket.socket:
    """Send the request and read nothing."""
    address, data = urlsplit(url), json.dumps(body).encode()
    client = socket.create_connection((address.hostname, address.port or 80))
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
    return client


def works(url: str) -> bool:
    """Whether the node has prompts to compute."""
    return value(scrape(url), "kvferry_waiting_tokens") > 0


def computed(cluster: LocalCluster) -> float:
    """Tokens of prompts, by all nodes; a step counts once it has ended."""
    urls = [lease.http_url for lease in cluster.leases()]
    return sum(value(scrape(url), "kvferry_step_tokens_total", phase="prefill") for url in urls)


def test_no_step_goes_on_whose_clients_have_left() -> None:
    """One step takes a whole prompt here, and a hundred times as long as that of who comes next, who would wait for it.
    The nodes hear of the clients' end in a small part of that time, however busy the machine is."""
    with local_cluster("--threads", "1", "--max-num-batched-tokens", str(LONG)) as cluster:
        complete(cluster, completion(LONG, 0))
        (prefill,) = cluster.worker_urls("prefill")
        for storm in range(1, STORMS + 1):
            with ExitStack() as clients:
                for number in range(CLIENTS):
                    clients.enter_context(ask(cluster.url, completion(LONG, 100 * storm + number)))
                wait_for(lambda: works(prefill), 60)
            before = computed(cluster)
            complete(cluster, completion(SHORT, 100 * storm + CLIENTS))
            cluster.settle(60)
            assert computed(cluster) - before < LONG
