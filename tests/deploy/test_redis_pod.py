"""The Redis of the manifests: its container's own script, probes and settings, run here on the embedded Valkey."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import redis

from kvferry.cli.preflight import check_redis, valkey_binary
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import RouterSettings
from kvferry.simulate.calibrate import leases_of
from tests.deploy.binaries import ROOT, need, redis_cli_binary
from tests.deploy.charts import chart
from tests.deploy.manifests import Manifest, Objects, of_kind, pod_specs, render
from tests.redis_servers import LOOPBACK, free_ports
from tests.waiting import wait_for

PASSWORD = "correct horse 'battery' $taple"
LINE = PASSWORD + "\n"
"""As `kubectl create secret --from-file` makes it of a file that ends in a newline."""


def container(objects: Objects) -> Manifest:
    found: Manifest = pod_specs(objects)["kvferry-redis"]["containers"][0]
    return found


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture
def environment(tmp_path: Path, port: int) -> dict[str, str]:
    """The pod's, with programs called as they are in its image, on the port of this test."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "valkey-server").symlink_to(valkey_binary())
    (programs / "valkey-cli").write_text(f'#!/bin/sh\nexec {need(redis_cli_binary(), "redis-cli")} -p {port} "$@"\n')
    (programs / "valkey-cli").chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "TMPDIR": str(tmp_path), "REDIS_PASSWORD": LINE}


@pytest.fixture
def server(environment: dict[str, str], port: int, tmp_path: Path) -> Iterator[redis.Redis]:
    """The container's command and arguments; yields a client with its password."""
    said = container(render("cpu"))
    here = ["--port", str(port), "--bind", LOOPBACK, "--dir", str(tmp_path)]
    process = subprocess.Popen([*said["command"], *said["args"], *here], env=environment, stdout=subprocess.DEVNULL)
    client = redis.Redis(port=port, username="kvferry", password=PASSWORD, socket_timeout=2)
    try:
        wait_for(lambda: answers(client), 20)
        yield client
    finally:
        client.close()
        process.terminate()
        process.wait(10)


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def probed(environment: dict[str, str], **changed: str) -> list[int]:
    said = container(render("cpu"))
    commands = [said[probe]["exec"]["command"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
    return [subprocess.run(each, env={**environment, **changed}, capture_output=True).returncode for each in commands]


def test_the_processes_are_let_in_by_the_password_and_nobody_else_is(
    server: redis.Redis, port: int, tmp_path: Path
) -> None:
    """With the URL and the file of the manifests. The check runs each command that a process of ours runs."""
    url = of_config("KVFERRY_REDIS_URL").replace("kvferry-redis:6379", f"{LOOPBACK}:{port}")
    (tmp_path / "password").write_text(LINE)
    settings = RouterSettings(redis_url=url, redis_password_file=str(tmp_path / "password"), cluster="c")
    assert check_redis(settings) == (check_redis(settings)[0], ""), "nobody writes to it without the password"
    (tmp_path / "password").write_text("wrong")
    with pytest.raises(ConfigError):
        check_redis(RouterSettings(redis_url=url, redis_password_file=str(tmp_path / "password"), cluster="c"))
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=port).ping()
    for words in (("CONFIG", "GET", "*"), ("ACL", "LIST"), ("GET", "other"), ("FLUSHALL",), ("KEYS", "*")):
        with pytest.raises(redis.exceptions.NoPermissionError):
            server.execute_command(*words)
    assert PASSWORD not in (tmp_path / "users.acl").read_text()
    assert (tmp_path / "users.acl").stat().st_mode & 0o077 == 0


async def test_a_plan_reads_the_rates_of_nodes_there(server: redis.Redis, port: int) -> None:
    """With what a pod has at hand; what it says to anyone who typed it has no password."""
    url = of_config("KVFERRY_REDIS_URL").replace("kvferry-redis:6379", f"{LOOPBACK}:{port}")
    with pytest.raises(ConfigError, match="no node of cluster default is ready") as told:
        await leases_of(url.replace("kvferry@", f"kvferry:{quote(PASSWORD)}@"))
    assert quote(PASSWORD) not in str(told.value)


def test_probes_pass_with_the_password_alone(server: redis.Redis, environment: dict[str, str]) -> None:
    """`valkey-cli ping` ends with 0 on NOAUTH, too."""
    assert probed(environment) == [0, 0, 0]
    assert all(probed(environment, REDIS_PASSWORD="wrong"))
    silent = subprocess.run(["valkey-cli", "ping"], env=environment, capture_output=True, text=True)
    assert silent.returncode == 0
    assert "NOAUTH" in silent.stdout


def test_no_probe_passes_while_nothing_answers(environment: dict[str, str]) -> None:
    assert all(probed(environment))


def test_without_a_password_it_does_not_start(environment: dict[str, str]) -> None:
    said = container(render("cpu"))
    command = [*said["command"], *said["args"]]
    for nothing in ("", "\n"):
        env = {**environment, "REDIS_PASSWORD": nothing}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=20)
        assert done.returncode != 0
        assert "is empty" in done.stderr


def test_what_its_user_may_do_is_what_the_page_says() -> None:
    (page,) = re.findall(r"resetchannels ~kvferry:\* (-@all .*)", (ROOT / "docs" / "redis.md").read_text())
    (script,) = (word for word in container(render("cpu"))["command"] if "users.acl" in word)
    assert re.findall(r"resetchannels ~kvferry:\* (.*)", script) == [page]


def test_over_tls_nothing_else_is_open() -> None:
    said = container(chart(redis={"tls": {"secretName": "tls"}}))
    options = dict(zip(said["args"][::2], said["args"][1::2], strict=True))
    assert (options["--port"], options["--tls-port"]) == ("0", "6379")
    mounts = [mount["mountPath"] for mount in said["volumeMounts"]]
    for name in ("--tls-cert-file", "--tls-key-file"):
        assert options[name].rpartition("/")[0] in mounts
    assert "--tls --cacert /run/kvferry/tls/ca.crt" in said["livenessProbe"]["exec"]["command"][-1]


def of_config(name: str) -> str:
    found = (item["data"] for item in of_kind(render("cpu"), "ConfigMap").values())
    return str(next(data[name] for data in found if name in data))
