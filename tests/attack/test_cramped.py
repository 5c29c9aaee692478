"""Attackers: those who fill what a machine has little of. The cluster has a disk of 4 MiB for clients' files, 64 MiB of
/dev/shm, 256 descriptors for each process, and half a GiB of memory for its router."""

from __future__ import annotations

import io
import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.attack.attacked import Attacked
from tests.attack.surroundings import inside, memory_of, missing
from tests.local_cluster import MODEL, local_cluster
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
DESCRIPTORS = 256
DISK_MIB = 4
ROUTER_BYTES = 512 << 20
AT_ONCE = 4
"""So many long bodies of one address are read at a time."""
KINDS = 8 if os.environ.get("KVFERRY_TEST_ATTACK") == "long" else AT_ONCE
"""Of long bodies. Each takes its turn, for seconds."""


@pytest.fixture(scope="module")
def shared_cramped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    if os.geteuid():
        pytest.skip("only root can mount small disks")
    if reason := missing("-m"):
        pytest.skip(reason)
    home = tmp_path_factory.mktemp("cramped")
    (home / "data").mkdir()
    steps = (
        f"mount -t tmpfs -o size={DISK_MIB}m,mode=0700 none {home}/data",
        "mount -t tmpfs -o size=64m,mode=1777 none /dev/shm",
        f"ulimit -n {DESCRIPTORS}",
    )
    env = {"KVFERRY_DATA_DIR": str(home / "data")}
    with local_cluster("--kv-blocks", "200", "--max-model-len", "1024", inside=inside(steps, "-m"), env=env) as cluster:
        yield Attacked(cluster, home, "", {"": "unused"})


@pytest.fixture
def cramped(shared_cramped: Attacked) -> Iterator[Attacked]:
    """The same processes go on afterwards, with the same tokens."""
    before = _pids(shared_cramped)
    shared_cramped.goes_on()
    yield shared_cramped
    shared_cramped.goes_on()
    shared_cramped.cluster.settle()
    assert _pids(shared_cramped) == before
    assert not [line for line in shared_cramped.cluster.log if "Traceback" in line]


def test_a_full_disk_fails_uploads_alone(cramped: Attacked) -> None:
    """At most: 507 for what needs the disk, in OpenAI's shape and without a path, until there is room again."""
    disk = Path(f"/proc/{cramped.cluster.process.pid}/root") / str(cramped.home).lstrip("/") / "data"
    assert os.statvfs(disk).f_blocks * os.statvfs(disk).f_frsize == DISK_MIB << 20
    answers = [_upload(cramped, b"x" * (900 << 10)) for _ in range(8)]
    stored = [answer.json()["id"] for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(stored) == 4
    for answer in refused:
        _is_an_error(answer, 507, "insufficient_storage", str(cramped.home))
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    row |= {"body": {"model": MODEL, "prompt": "1, 2, 3,", "max_tokens": 2}}  # type: ignore[dict-item]
    while (answer := _upload(cramped, b"y" * (16 << 10))).status_code == 200:
        stored.append(answer.json()["id"])
    cramped.says("hello")
    for each in stored:
        assert cramped.ask("DELETE", f"/v1/files/{each}").status_code == 200
    rows = _upload(cramped, json.dumps(row).encode())
    assert rows.status_code == 200, rows.text
    body = {"input_file_id": rows.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = cramped.ask("POST", "/v1/batches", json=body).json()["id"]
    wait_for(lambda: cramped.ask("GET", f"/v1/batches/{batch}").json()["status"] == "completed", 30)


def test_a_batch_on_a_full_disk_waits_for_room(cramped: Attacked) -> None:
    """At most: it waits. No row is lost, and none is answered twice in its results."""
    rows = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions",
         "body": {"model": MODEL, "prompt": "1, 2, 3,", "max_tokens": 2}}
        for n in range(6)
    ]  # fmt: skip
    given = _upload(cramped, "\n".join(map(json.dumps, rows)).encode()).json()["id"]
    ballast = []
    for size in (256 << 10, 4 << 10, 1):
        while (answer := _upload(cramped, b"z" * size)).status_code == 200:
            ballast.append(answer.json()["id"])
    body = {"input_file_id": given, "endpoint": "/v1/completions", "completion_window": "24h"}
    made = cramped.ask("POST", "/v1/batches", json=body)
    if made.status_code != 200:
        _is_an_error(made, 507, "insufficient_storage", str(cramped.home))
    cramped.says("hello")
    for each in ballast:
        assert cramped.ask("DELETE", f"/v1/files/{each}").status_code == 200
    if made.status_code != 200:
        made = cramped.ask("POST", "/v1/batches", json=body)
    name = made.json()["id"]
    wait_for(lambda: cramped.ask("GET", f"/v1/batches/{name}").json()["status"] == "completed", 60)
    output = cramped.ask("GET", f"/v1/batches/{name}").json()["output_file_id"]
    found = cramped.ask("GET", f"/v1/files/{output}/content").text.splitlines()
    assert sorted(json.loads(line)["custom_id"] for line in found) == [str(n) for n in range(6)]


def test_bodies_that_want_all_memory_get_errors(cramped: Attacked) -> None:
    """At most: 4xx and closed connections. The router's process is the same one afterwards."""
    (router,) = cramped.cluster.children("router")
    with memory_of(router.pid, ROUTER_BYTES):
        with ThreadPoolExecutor(AT_ONCE) as threads:
            statuses = list(threads.map(partial(_posted, cramped), enumerate(_bodies()[:KINDS])))
        assert all(400 <= status < 500 for status in statuses), statuses
        assert 400 in statuses, "one at least was read, while the others waited for their turn"
        cramped.says("hello")
    assert router.is_running()


def test_few_descriptors_shed_connections_and_serve_the_others(cramped: Attacked) -> None:
    """At most: 429 or a closed connection for those that came last, and a line in the log that says what to raise."""
    assert [line for line in cramped.cluster.log if f"{DESCRIPTORS} open files are too few" in line]
    place = urlsplit(cramped.cluster.url)
    with httpx.Client(base_url=cramped.cluster.url, trust_env=False, timeout=30) as early, ExitStack() as stack:
        assert early.get("/health").status_code == 200
        idle = [_dialled(stack, (place.hostname or "", place.port or 0)) for _ in range(300)]
        body = {"model": MODEL, "prompt": "1, 2, 3,", "max_tokens": 2}
        assert early.post("/v1/completions", json=body).status_code == 200, "who was there first is served"
        shed = [each for each in idle if each is None or _answered(each)]
        assert len(shed) >= 300 - DESCRIPTORS // 2
    wait_for(lambda: cramped.ask("GET", "/health").status_code == 200, 10)


def test_workers_with_few_descriptors_outlive_a_flood(cramped: Attacked) -> None:
    """At most: new connections to workers wait while it lasts. What runs goes on, nodes stay in the registry, and the
    log says so seldom."""
    leases = cramped.cluster.leases()
    with ExitStack() as stack:
        for lease in leases:
            for address in (lease.http_url.removeprefix("http://"), lease.link_address):
                host, _, port = address.rpartition(":")
                for _ in range(DESCRIPTORS):
                    _dialled(stack, (host, int(port)), 0.1)
        time.sleep(1)
        cramped.goes_on()
    cramped.goes_on()
    assert 1 <= len([line for line in cramped.cluster.log if "connections cannot be accepted" in line]) <= 6
    assert {lease.node_id for lease in cramped.cluster.leases()} == {lease.node_id for lease in leases}


def _upload(cramped: Attacked, content: bytes) -> httpx.Response:
    file = ("in.jsonl", io.BytesIO(content))
    return cramped.ask("POST", "/v1/files", files={"file": file}, data={"purpose": "batch"})


def _is_an_error(answer: httpx.Response, status: int, code: str, secret: str) -> None:
    """In OpenAI's shape."""
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert secret not in answer.text


def _bodies() -> list[bytes]:
    """Of nearly the longest length that is read, each a way to make much of it."""
    size = 15 << 20
    return [
        b'{"model":"m","messages":' + b"[" * size,
        b'{"model":"m","prompt":[' + b"[1]," * (size // 4) + b"[1]]}",
        b'{"model":"m","prompt":[' + b"1," * (size // 2) + b"1]}",
        b'{"model":"m","prompt":"' + b"\\u0041" * (size // 6) + b'"}',
        b"{" + b",".join(b'"%d":{}' % n for n in range(size // 12)) + b"}",
        json.dumps({"model": MODEL, "prompt": "word " * (size // 5)}).encode(),
        b'{"model":"m","seed":' + b"9" * size + b"}",
        b"\xff" * size,
    ]


def _posted(cramped: Attacked, numbered: tuple[int, bytes]) -> int:
    path = ("/v1/completions", "/v1/chat/completions", "/tokenize")[numbered[0] % 3]
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=cramped.cluster.url, trust_env=False, timeout=60) as client:
        return client.post(path, content=numbered[1], headers=headers).status_code


def _dialled(stack: ExitStack, address: tuple[str, int], limit_s: float = 2.0) -> socket.socket | None:
    """None: nobody took the connection."""
    with suppress(OSError):
        return stack.enter_context(socket.create_connection(address, timeout=limit_s))
    return None


def _answered(sock: socket.socket) -> bool:
    """Whether the server said something, or closed it, without having been asked."""
    sock.settimeout(0.01)
    try:
        sock.recv(1000)
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def _pids(cramped: Attacked) -> set[int]:
    return {process.pid for role in ("router", "prefill", "decode") for process in cramped.cluster.children(role)}
