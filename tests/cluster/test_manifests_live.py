"""The processes of the Kubernetes manifests, started here with exactly their flags and environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from kvferry.cli.preflight import free_port, valkey_binary
from tests.deploy.binaries import ROOT
from tests.deploy.manifests import manifest_command
from tests.local_cluster import MODEL
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@contextmanager
def ending(process: subprocess.Popen[bytes], seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    """SIGTERM at the end, as the kubelet does, and SIGKILL after the grace."""
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(seconds)
        finally:
            process.kill()
            process.wait(5)


@contextmanager
def started(deployment: str, redis_port: int, password_file: Path) -> Iterator[str]:
    """The container's command, its ports and its Redis' replaced by ones the kernel chooses, the Secrets' files by
    others; yields its URL once it serves."""
    argv, env = manifest_command(deployment)
    redis_url = env["KVFERRY_REDIS_URL"].replace("kvferry-redis:6379", f"127.0.0.1:{redis_port}")
    secrets = {"KVFERRY_REDIS_URL": redis_url, "KVFERRY_REDIS_PASSWORD_FILE": str(password_file)}
    secrets["KVFERRY_CLUSTER_SECRET_FILE"] = str(password_file)
    reports, write = os.pipe()
    more = ["--port", "0"] + ([] if argv[1] == "router" else ["--link-port", "0"])
    process = subprocess.Popen(
        [sys.executable, "-m", "kvferry.cli.main", *argv[1:], *more],
        env={**os.environ, **env, **secrets, "KVFERRY_STATUS_FD": str(write)},
        pass_fds=(write,),
    )
    os.close(write)
    with ending(process, 20), os.fdopen(reports) as lines:
        yield next(report["url"] for report in map(json.loads, lines) if report["status"] == "ready")


@contextmanager
def redis_started(home: Path, port: int) -> Iterator[Path]:
    """The container of Redis with its user and password; yields the file with the password."""
    (home / "valkey-server").symlink_to(valkey_binary())
    password = home / "password"
    password.write_text("correct horse battery staple\n")
    argv, env = manifest_command("kvferry-redis")
    env |= {"PATH": f"{home}:{os.environ['PATH']}", "TMPDIR": str(home), "REDIS_PASSWORD": password.read_text()}
    here = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(home)]
    with ending(subprocess.Popen([*argv, *here], env={**os.environ, **env}, stdout=subprocess.DEVNULL), 5):
        yield password


def test_the_manifests_make_a_cluster_that_answers(tmp_path: Path) -> None:
    with ExitStack() as stack:
        port = free_port("127.0.0.1", 0)
        password = stack.enter_context(redis_started(tmp_path, port))
        for deployment in ("kvferry-prefill", "kvferry-decode"):
            url = stack.enter_context(started(deployment, port, password))
            assert httpx.get(url.replace("0.0.0.0", "127.0.0.1") + "/ready").status_code == 200
        router = stack.enter_context(started("kvferry-router", port, password)).replace("0.0.0.0", "127.0.0.1")
        wait_for(lambda: httpx.get(f"{router}/ready?nodes=1").status_code == 200, 20)
        client = openai.OpenAI(base_url=f"{router}/v1", api_key="unused", timeout=60)
        made = client.completions.with_raw_response.create(model=MODEL, prompt="The sea is", max_tokens=3)
        assert "decode=kvferry-decode-0" in made.headers["x-kvferry-route"]
        # What `helm test` runs, in a pod of the router's image.
        script = ROOT / "deploy" / "helm" / "kvferry" / "files" / "completion.py"
        env = {**os.environ, "ROUTER": router}
        asked = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=60)
        assert asked.returncode == 0, asked.stderr
        assert "went on with" in asked.stdout
        assert "decode=kvferry-decode-0" in asked.stdout
