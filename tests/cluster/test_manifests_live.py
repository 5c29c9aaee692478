"""The processes of the Kubernetes manifests, started here with exactly their flags and environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import openai
import pytest
from local_cluster import MODEL
from waiting import wait_for

from cli.preflight import free_port, valkey_binary
from tests.deploy.manifests import manifest_command

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
def started(deployment: str, redis_url: str) -> Iterator[str]:
    """The container's command, its ports replaced by ones the kernel chooses; yields its URL once it serves."""
    argv, env = manifest_command(deployment)
    reports, write = os.pipe()
    more = ["--port", "0"] + ([] if argv[1] == "router" else ["--link-port", "0"])
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", *argv[1:], *more],
        env={**os.environ, **env, "KVFERRY_REDIS_URL": redis_url, "KVFERRY_STATUS_FD": str(write)},
        pass_fds=(write,),
    )
    os.close(write)
    with ending(process, 20), os.fdopen(reports) as lines:
        yield next(report["url"] for report in map(json.loads, lines) if report["status"] == "ready")


def test_the_manifests_make_a_cluster_that_answers() -> None:
    with ExitStack() as stack:
        port = free_port("127.0.0.1", 0)
        command = [valkey_binary(), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        stack.enter_context(ending(subprocess.Popen(command, stdout=subprocess.DEVNULL), 5))
        redis_url = f"redis://127.0.0.1:{port}/0"
        for deployment in ("kvferry-prefill", "kvferry-decode"):
            url = stack.enter_context(started(deployment, redis_url))
            assert httpx.get(url.replace("0.0.0.0", "127.0.0.1") + "/ready").status_code == 200
        router = stack.enter_context(started("kvferry-router", redis_url)).replace("0.0.0.0", "127.0.0.1")
        wait_for(lambda: httpx.get(f"{router}/ready").status_code == 200, 20)
        client = openai.OpenAI(base_url=f"{router}/v1", api_key="unused", timeout=60)
        made = client.completions.with_raw_response.create(model=MODEL, prompt="The sea is", max_tokens=3)
        assert "decode=kvferry-decode-0" in made.headers["x-kvferry-route"]
