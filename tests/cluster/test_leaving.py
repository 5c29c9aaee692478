"""Clients that leave in the middle of long steps: whoever comes next need not wait for what they had asked for."""

from __future__ import annotations

import json
import random
import socket
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import pytest
from local_cluster import MODEL, LocalCluster, local_cluster, scrape, value
from waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG, SHORT = 2000, 20
CLIENTS, STORMS = 8, 3


def completion(tokens: int, seed: int) -> dict[str, object]:
    """On a prompt that shares nothing with others."""
    prompt = random.Random(seed).choices(range(1000, 40000), k=tokens)
    return {"model": MODEL, "prompt": prompt, "max_tokens": 2, "ignore_eos": True}


def seconds(cluster: LocalCluster, body: dict[str, object]) -> float:
    began = time.monotonic()
    assert httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120).status_code == 200
    return time.monotonic() - began


def ask(url: str, body: dict[str, object]) -> socket.socket:
    """Send the request and read nothing."""
    address, data = urlsplit(url), json.dumps(body).encode()
    client = socket.create_connection((address.hostname, address.port or 80))
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
    return client


def works(url: str) -> bool:
    """Whether the node has prompts to compute."""
    return value(scrape(url), "kvferry_waiting_tokens") > 0


def test_whoever_comes_after_clients_that_left_waits_for_none_of_their_steps() -> None:
    """One step takes a whole prompt here, which takes a hundred times as long as the one that comes next."""
    with local_cluster("--threads", "1", "--max-num-batched-tokens", str(LONG)) as cluster:
        seconds(cluster, completion(LONG, 0))
        alone = seconds(cluster, completion(LONG, 1))
        (prefill,) = cluster.worker_urls("prefill")
        for storm in range(1, STORMS + 1):
            with ExitStack() as clients:
                for number in range(CLIENTS):
                    clients.enter_context(ask(cluster.url, completion(LONG, 100 * storm + number)))
                wait_for(lambda: works(prefill), 60)
            left = time.monotonic()
            seconds(cluster, completion(SHORT, 100 * storm + CLIENTS))
            waited = time.monotonic() - left
            assert waited < alone / 2, f"{waited:.2f} s; a prompt of those who left takes {alone:.2f} s"
        cluster.settle()
