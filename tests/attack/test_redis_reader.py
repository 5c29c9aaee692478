"""Attacker: one that reads all of Redis, in a dump or live.

At most it reads leases, counts and hashes, what clients had stored by `/v1/responses`, for as long as it is kept, and
the journals of requests that are to be resumed (an `Idempotency-Key`, or events with ids), for `--resume-window`.
test_redis_writer.py is about one that writes."""

from __future__ import annotations

import json
import struct
from typing import Any

import msgpack
import pytest
import redis

from tests.attack.attacked import MARKER, TENANTS, Attacked
from tests.local_cluster import MODEL
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
RUN = 6
"""So many tokens of a text in a row say what it was."""
READERS: dict[bytes, Any] = {
    b"none": lambda client, key: [],  # it expired meanwhile
    b"string": lambda client, key: [client.get(key) or b""],
    b"hash": lambda client, key: [part for pair in client.hgetall(key).items() for part in pair],
    b"set": lambda client, key: list(client.smembers(key)),
    b"zset": lambda client, key: client.zrange(key, 0, -1),
    b"list": lambda client, key: client.lrange(key, 0, -1),
    b"stream": lambda client, key: [repr(row).encode() for row in client.xrange(key)],
}


def everything(attacked: Attacked) -> dict[bytes, bytes]:
    """All keys and values, and the commands that clients sent last."""
    with redis.Redis(unix_socket_path=attacked.cluster.redis_url.removeprefix("unix://")) as client:
        found = {key: b"\0".join(READERS[client.type(key)](client, key)) for key in client.scan_iter(count=1000)}
        found[b"SLOWLOG"] = repr(client.slowlog_get(1000)).encode()
        found[b"CLIENT LIST"] = repr(client.client_list()).encode()
    return found


def spellings(tokens: list[int]) -> set[bytes]:
    """How bytes could hold these tokens one after another."""
    made = set()
    for start in range(len(tokens) - RUN):
        run = tokens[start : start + RUN]
        made |= {b"".join(msgpack.packb(each) for each in run), json.dumps(run)[1:-1].encode()}
        made |= {json.dumps(run, separators=(",", ":"))[1:-1].encode(), ", ".join(map(str, run)).encode()}
        made |= {struct.pack(f"{order}{RUN}{kind}", *run) for order in "<>" for kind in "HIQ"}
    return made


def test_redis_holds_no_text_no_tokens_and_no_secret(attacked: Attacked) -> None:
    """At most: hashes of blocks, sizes, and addresses. Nothing that was said or answered, in no spelling."""
    tokens = attacked.ask("POST", "/tokenize", json={"model": MODEL, "prompt": MARKER * 4}).json()["tokens"]
    assert len(tokens) > 40
    for held in (
        msgpack.packb(["job", tokens]),
        json.dumps({"ids": tokens}).encode(),
        struct.pack(f"<{len(tokens)}I", *tokens),
    ):
        assert [run for run in spellings(tokens) if run in held], "they would be found"
    kept = {key for key in everything(attacked) if b":j:" in key}  # of the tests before
    said = attacked.says(MARKER * 6, TENANTS[0], 24, return_token_ids=True, temperature=0)
    output = said["choices"][0]["message"]["content"]
    body = {"model": MODEL, "prompt": MARKER * 4, "max_tokens": 4, "user": "user-marker"}
    for tenant in TENANTS:
        assert attacked.ask("POST", "/v1/completions", tenant, json=body).status_code == 200
    asked = {"model": MODEL, "input": MARKER, "max_output_tokens": 16, "store": False}
    assert attacked.ask("POST", "/v1/responses", TENANTS[0], json=asked).status_code == 200

    def rows() -> list[bytes]:
        return [key for key in everything(attacked) if b":b:" in key or b":g:" in key]

    wait_for(rows, 20)
    forbidden = {each.encode() for each in (*attacked.secrets, *TENANTS, "user-marker", "pineapples", "velvet walrus")}
    forbidden |= {output[:30].encode(), *spellings(tokens)} - {b""}
    found = everything(attacked)
    for key, value in found.items():
        if b":r:" not in key and key not in kept:
            assert not [each for each in forbidden if each in key or each in value], key


def test_a_deleted_response_that_was_streamed_leaves_no_journal(attacked: Attacked) -> None:
    asked = {"model": MODEL, "input": "Nine teal badgers audit a lighthouse.", "max_output_tokens": 16, "stream": True}
    told = attacked.ask("POST", "/v1/responses", TENANTS[0], json=asked).text
    made = json.loads(next(line for line in told.splitlines() if line.startswith("data: {"))[6:])["response"]["id"]
    wait_for(lambda: [key for key in everything(attacked) if b":j:" in key and made.encode() in key], 10)
    assert attacked.ask("DELETE", f"/v1/responses/{made}", TENANTS[0]).status_code == 200

    def left() -> list[bytes]:
        return [key for key, value in everything(attacked).items() if b"teal badgers" in value]

    wait_for(lambda: not left(), 10, lambda: repr(left()))


def test_a_stored_response_is_in_its_record_alone_and_gone_when_deleted(attacked: Attacked) -> None:
    """At most: the record itself, which its tenant asked for, under a name that tells no tenant."""
    text = "Seven amber otters memorise the tax code of Liechtenstein."
    asked = {"model": MODEL, "input": text, "max_output_tokens": 16}
    made = attacked.ask("POST", "/v1/responses", TENANTS[0], json=asked).json()["id"]
    holding = [key for key, value in everything(attacked).items() if b"amber otters" in value]
    assert all(b":r:" in key and made.encode() in key for key in holding)
    assert len(holding) == 1
    assert not [key for key in everything(attacked) if TENANTS[0].encode() in key]
    assert attacked.ask("DELETE", f"/v1/responses/{made}", TENANTS[0]).status_code == 200
    assert not [key for key, value in everything(attacked).items() if b"amber otters" in value]
