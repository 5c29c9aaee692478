"""Attackers: those who run the network, its names and its clocks. The cluster knows no IPv4, looks names up in ten
seconds, and has a wall clock that jumps by an hour."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis

from kvferry.cli.preflight import valkey_binary
from kvferry.router.tenants.keys import entry, new_key
from tests.attack import slow_names
from tests.attack.attacked import COUNTING, Attacked
from tests.attack.surroundings import inside, missing, network_of
from tests.local_cluster import MODEL, local_cluster
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
HOUR = 3600
WEEK, LEASE_S = 7 * 24 * HOUR, 60
LIMITED, PER_MINUTE = "limited", 3
LOOKUP_S = 10.0
REDIS_LOOKUP_S = LOOKUP_S if os.environ.get("KVFERRY_TEST_ATTACK") == "long" else 4.0
"""Either is longer than a connection to Redis may take to be made."""
ONLY_IPV6 = ("ip link set lo up", "ip addr del 127.0.0.1/8 dev lo")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.geteuid():
        pytest.skip("only root can make networks")
    if reason := missing("-m", "-n"):
        pytest.skip(reason)
    for tool in ("ip", "c++"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    made = tmp_path_factory.mktemp("elsewhere")
    source = Path(__file__).with_name("clock_shim.cpp")
    subprocess.run(
        ["c++", "-std=c++17", "-O2", "-shared", "-fPIC", "-o", made / "clock.so", source, "-ldl"], check=True
    )
    (made / "resolv.conf").write_text("nameserver ::1\noptions timeout:30 attempts:1\n")
    return made


def names(home: Path, delay_s: float) -> tuple[str, ...]:
    """Steps after which names are looked up so slowly."""
    server = f"{sys.executable} {slow_names.__file__} ::1 53 {delay_s} &"
    return f"mount --bind {home}/resolv.conf /etc/resolv.conf", server


@pytest.fixture(scope="module")
def shared_elsewhere(home: Path) -> Iterator[Attacked]:
    keys = {LIMITED: new_key(), "": new_key()}
    (home / "keys.toml").write_text(entry(LIMITED, keys[LIMITED]) + f"requests_per_minute = {PER_MINUTE}\n")
    jump(home, 0)
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector.example:4318", "KVFERRY_API_KEY": keys[""],
        "LD_PRELOAD": str(home / "clock.so"), "ATTACK_CLOCK": str(home / "clock"),
    }  # fmt: skip
    steps = (*ONLY_IPV6, *names(home, LOOKUP_S))
    options = ("--host", "::1", "--api-keys", str(home / "keys.toml"), "--kv-blocks", "200", "--max-model-len", "1024")
    with local_cluster(*options, inside=inside(steps, "-m", "-n"), env=env) as cluster:
        yield Attacked(cluster, home, "", keys)


@pytest.fixture
def elsewhere(shared_elsewhere: Attacked) -> Iterator[Attacked]:
    """The test is in the cluster's network. Afterwards the clock is right again, and all goes on."""
    with network_of(shared_elsewhere.cluster.process.pid):
        shared_elsewhere.goes_on()
        yield shared_elsewhere
        jump(shared_elsewhere.home, 0)
        shared_elsewhere.goes_on()
        shared_elsewhere.cluster.settle(20)
        assert not [line for line in shared_elsewhere.cluster.log if "Traceback" in line]


def jump(home: Path, seconds: int) -> None:
    """The wall clock of every process of the cluster is so far off from now on."""
    (home / "clock").touch()
    with (home / "clock").open("r+b") as file:
        file.write(struct.pack("<q", seconds))


def test_a_cluster_without_ipv4_answers(elsewhere: Attacked) -> None:
    """At most: nothing. Every address that its processes tell each other is one of IPv6."""
    assert elsewhere.says("hello")["choices"][0]["message"]["content"]
    leases = elsewhere.cluster.leases()
    assert len(leases) == 2
    assert all("[::1]" in lease.http_url and "[::1]" in lease.link_address for lease in leases)


def test_a_collector_whose_name_takes_ten_seconds_delays_no_request(elsewhere: Attacked) -> None:
    """At most: traces are lost. Start-up and requests take what they take anyway."""
    wait_for(lambda: [line for line in elsewhere.cluster.log if "collector.example" in line], LOOKUP_S)
    for _ in range(3):
        began = time.monotonic()
        elsewhere.tokens()
        assert time.monotonic() - began < LOOKUP_S / 2


def test_redis_whose_name_takes_seconds_is_found_in_the_end(home: Path, tmp_path: Path) -> None:
    """At most: the router is not ready until the name is found; it starts, is alive, and says what it waits for."""
    steps = ("ip link set lo up", *names(home, REDIS_LOOKUP_S), f"{valkey_binary()} --port 6390 --save '' >&2 &")
    options = {"--port": "8000", "--redis-url": "redis://redis.example:6390", "--data-dir": str(tmp_path)}
    words = [word for option in options.items() for word in option]
    command = [*inside(steps, "-m", "-n"), sys.executable, "-m", "kvferry.cli.main", "router", *words]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        status: Callable[[str], int] = lambda path: _status(f"http://127.0.0.1:8000{path}")  # noqa: E731
        time.sleep(0.5)
        with network_of(process.pid):
            wait_for(lambda: status("/health") == 200, 60)
            wait_for(lambda: status("/ready") == 200, 3 * LOOKUP_S)
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        try:
            process.wait(20)
        finally:
            for each in (process, *children):
                each.kill()


def test_streams_go_on_when_the_clock_jumps(elsewhere: Attacked) -> None:
    """At most: leases are missing in Redis until they are renewed. No token changes, and no node is lost to routers."""
    expected = _streamed(elsewhere, [])
    for seconds in (HOUR, -HOUR, 0):
        assert _streamed(elsewhere, [seconds]) == expected, seconds
        elsewhere.goes_on()
        wait_for(lambda: len(elsewhere.cluster.leases()) == 2, 10)
    assert not [line for line in elsewhere.cluster.log if "is lost" in line]


def test_leases_do_not_last_longer_after_a_jump_back(elsewhere: Attacked) -> None:
    """At most: what has an hour to live has two, or none. Leases never outlive their nodes by more than seconds."""
    jump(elsewhere.home, HOUR)
    elsewhere.goes_on()
    body = {"model": MODEL, "input": "hello", "max_output_tokens": 16}
    made = elsewhere.ask("POST", "/v1/responses", json=body).json()["id"]
    assert elsewhere.ask("GET", f"/v1/responses/{made}").status_code == 200
    jump(elsewhere.home, 0)
    elsewhere.goes_on()

    def lives() -> dict[str, float]:
        with redis.Redis(unix_socket_path=elsewhere.cluster.redis_url.removeprefix("unix://")) as client:
            return {key.decode(errors="replace"): client.pttl(key) / 1e3 for key in client.scan_iter(count=1000)}

    def leases() -> list[float]:
        return [life for key, life in lives().items() if ":node:" in key]

    wait_for(lambda: len(leases()) == 2 and max(leases()) < LEASE_S, 20, leases)
    assert [key for key, life in lives().items() if life < 0] == ["kvferry:default:nodes"], "all else expires"
    assert max(lives().values()) <= WEEK + HOUR
    assert elsewhere.ask("GET", f"/v1/responses/{made}").status_code == 200


def test_a_node_that_restarts_after_a_jump_back_is_used(elsewhere: Attacked) -> None:
    """At most: the seconds of its start. Its new lease is younger by no clock."""
    jump(elsewhere.home, HOUR)
    elsewhere.goes_on()
    before = elsewhere.cluster.worker("decode-0")
    jump(elsewhere.home, -HOUR)
    starts = _starts(elsewhere)
    before.send_signal(signal.SIGKILL)
    wait_for(lambda: _starts(elsewhere) > starts, 90, lambda: elsewhere.cluster.log[-3:])
    began = time.monotonic()
    elsewhere.goes_on()
    assert time.monotonic() - began < 10


def test_limits_of_a_tenant_neither_end_nor_begin_with_a_jump(elsewhere: Attacked) -> None:
    """At most: nothing. A limit per minute is one of minutes that passed."""

    def asks() -> httpx.Response:
        return elsewhere.ask("POST", "/tokenize", LIMITED, json={"model": MODEL, "prompt": "a"})

    body = {"model": MODEL, "prompt": COUNTING, "max_tokens": 1}

    def status() -> int:
        return elsewhere.ask("POST", "/v1/completions", LIMITED, json=body).status_code

    wait_for(lambda: status() == 200, 70)  # at once, but for a test that is tried again
    assert [status() for _ in range(PER_MINUTE + 3)][-1] == 429
    for seconds in (HOUR, -HOUR):
        jump(elsewhere.home, seconds)
        limited = elsewhere.ask("POST", "/v1/completions", LIMITED, json=body)
        assert limited.status_code == 429, "an hour of the wall clock refills nothing"
        assert 0 < float(limited.headers["retry-after"]) <= 60
    assert asks().status_code in (200, 429)


def _starts(elsewhere: Attacked) -> int:
    return sum("decode-0 ready at" in line for line in elsewhere.cluster.log)


def _streamed(elsewhere: Attacked, jumps: list[int], count: int = 60) -> list[int]:
    """Tokens of a stream during which the clock jumps."""
    body: dict[str, Any] = {
        "model": MODEL, "prompt": COUNTING, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    headers = {"authorization": f"Bearer {elsewhere.keys['']}"}
    found, last = list[int](), time.monotonic()
    url = f"{elsewhere.cluster.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60, trust_env=False) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                found += [token for choice in choices for token in choice.get("token_ids") or ()]
                assert time.monotonic() - last < 10
                last = time.monotonic()
                if jumps and len(found) > count // 3:
                    jump(elsewhere.home, jumps.pop())
    assert len(found) == count
    return found


def _status(url: str) -> int:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code
    except httpx.HTTPError:
        return 0
