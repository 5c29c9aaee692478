"""Attacker: a process that can write to Redis, but does not know the cluster's secret.

At most it stops requests while it writes, and has prompts computed again. It receives nothing and changes no answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import redis

from kvferry.protocol.lease import NodeLease
from kvferry.protocol.wire import pack, unpack
from tests.attack.attacked import COUNTING, MARKER, TENANTS, Attacked
from tests.local_cluster import MODEL
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LEASES = "kvferry:default:node:"
WRITES_S = 4.0


class Trap:
    """An HTTP server of the attacker, and what was sent to it."""

    def __init__(self) -> None:
        self.received: list[str] = []
        trap = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                trap.received.append(f"{self.path} {dict(self.headers)}")
                self.send_error(500)

            do_GET = do_POST

            def log_message(self, *words: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    @contextmanager
    def open(self) -> Iterator[None]:
        serving = threading.Thread(target=self.server.serve_forever, daemon=True)
        serving.start()
        try:
            yield
        finally:
            self.server.shutdown()
            self.server.server_close()
            serving.join(10)


def connected(attacked: Attacked) -> redis.Redis:
    return redis.Redis(unix_socket_path=attacked.cluster.redis_url.removeprefix("unix://"))


@contextmanager
def written(client: redis.Redis, rows: dict[str, bytes]) -> Iterator[None]:
    """These values stand under their keys, whatever the nodes write there; at the end the nodes' own are back."""
    over = threading.Event()

    def write() -> None:
        while not over.wait(0.01):
            for key, value in rows.items():
                client.set(key, value, px=5000)
                client.hset("kvferry:default:nodes", key.removeprefix(LEASES), 1)

    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    try:
        yield
    finally:
        over.set()
        writing.join(10)
        for key in rows:
            client.delete(key)


def redirected(sealed: bytes, url: str, node_id: str = "") -> bytes:
    """The lease as it was written, but for the addresses; the seal is the old one."""
    version, name, role, packed, *seal = unpack(sealed)
    lease = unpack(packed)
    assert isinstance(lease, NodeLease)
    name = node_id or name
    lease = replace(lease, node_id=name, http_url=url, link_address=url.removeprefix("http://"))
    return pack([version, name, role, pack(lease), *seal])


def test_a_rewritten_or_invented_lease_brings_no_prompt_to_the_attacker(attacked: Attacked) -> None:
    """Two prompts arrived in clear text, with the header that lets into every node, before leases had a seal."""
    trap = Trap()
    with connected(attacked) as client, trap.open():
        real = {name: client.get(LEASES + name) for name in ("prefill-0", "decode-0")}
        rows = {LEASES + name: redirected(bytes(lease), trap.url) for name, lease in real.items() if lease}
        rows[LEASES + "decode-9"] = redirected(bytes(real["decode-0"] or b""), trap.url, node_id="decode-9")
        rows[LEASES + "decode-8"] = rows[LEASES + "decode-9"][:-5]
        assert len(rows) == 4
        with written(client, rows):
            for _ in range(int(WRITES_S)):
                body = {"model": MODEL, "prompt": MARKER, "max_tokens": 4}
                answer = attacked.ask("POST", "/v1/completions", TENANTS[0], json=body)
                assert answer.status_code in (200, 503), answer.text
                threading.Event().wait(1.0)
        assert trap.received == []
    log = "\n".join(attacked.cluster.log)
    assert "decode-9 has a lease that is not authenticated with this cluster's secret: not used" in log
    wait_for(lambda: {lease.node_id for lease in attacked.cluster.leases()} == {"prefill-0", "decode-0"}, 20)
    attacked.cluster.settle()


def test_invented_rows_of_the_index_change_no_answer(attacked: Attacked) -> None:
    """At most: a prompt is computed where another node would have had it, and fetched from nobody."""
    before = attacked.tokens()
    with connected(attacked) as client:
        rows = [key for pattern in ("kvferry:default:b:*", "kvferry:default:g:*") for key in client.scan_iter(pattern)]
        epochs = client.hgetall("kvferry:default:nodes")
        assert rows, "blocks are known"
        for key in rows:
            for field, value in client.hgetall(key).items():
                for name, epoch in epochs.items():
                    odd = field.replace(b"decode-0", name).replace(b"prefill-0", name)
                    client.hset(key, odd, epoch)
                client.hset(key, field.replace(b"decode-0", b"http://attacker"), value)
                client.hset(key, b"\xff" * 40, b"not a number")
    assert attacked.tokens() == before
    body = {"model": MODEL, "prompt": COUNTING * 3, "max_tokens": 4, "temperature": 0}
    assert attacked.ask("POST", "/v1/completions", json=body).status_code == 200


def test_a_planted_response_is_in_no_conversation(attacked: Attacked) -> None:
    """At most: it is gone. Its text was part of the tenant's next prompt."""
    asked = {"model": MODEL, "input": "Say a word.", "max_output_tokens": 4}
    made = attacked.ask("POST", "/v1/responses", TENANTS[0], json=asked).json()["id"]
    with connected(attacked) as client:
        (key,) = client.scan_iter(f"kvferry:default:r:*:{made}")
        record = client.get(key)
        assert record
        assert b"Say a word." in record
        client.set(key, record.replace(b"Say a word.", b"Say a lie.."))
    for answer in (
        attacked.ask("GET", f"/v1/responses/{made}", TENANTS[0]),
        attacked.ask("POST", "/v1/responses", TENANTS[0], json=asked | {"previous_response_id": made}),
    ):
        assert answer.status_code == 404, answer.text
        assert "lie" not in answer.text
