"""A real Prometheus for tests: scrapes given processes once a second and answers PromQL."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from kvferry.cli.preflight import free_port
from tests.deploy.binaries import need, prometheus_binary

START_TIMEOUT_S = 30.0
SCRAPE_INTERVAL = "1s"


def query(base_url: str, expression: str) -> list[dict[str, Any]]:
    """Series of an instant query. Raises RuntimeError with Prometheus' own words where it refuses the expression."""
    # Plain HTTP: loading certificates would take longer than the query.
    with httpx.Client(verify=False) as client:  # noqa: S501
        response = client.post(f"{base_url}/api/v1/query", data={"query": expression}, timeout=30.0)
    answer = response.json()
    if answer.get("status") != "success":
        raise RuntimeError(f"{expression}: {answer.get('error', response.text)}")
    result = answer["data"]["result"]
    return result if answer["data"]["resultType"] == "vector" else [{"metric": {}, "value": result}]


def wait_for(base_url: str, expression: str, timeout_s: float = 30.0) -> list[dict[str, Any]]:
    """Series of `expression` as soon as there are any. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if series := query(base_url, expression):
            return series
        time.sleep(0.2)
    raise TimeoutError(f"no series of {expression} in {timeout_s:.0f} s")


def wait_scraped(base_url: str, targets: int, scrapes: int = 3, timeout_s: float = 60.0) -> None:
    """Return once this many targets were each scraped so often that rates have values. Raises TimeoutError."""
    wait_for(base_url, f"count(count_over_time(up[1m]) >= {scrapes} and up == 1) >= {targets}", timeout_s)


@contextmanager
def running_prometheus(
    targets: Sequence[str], rules: Sequence[Path] = (), labels: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Base URL of a Prometheus that scrapes `http://{target}/metrics` of each `host:port` and adds the labels; skips
    the test if there is no binary."""
    with configured_prometheus(_config(targets, rules, labels or {})) as url:
        yield url


@contextmanager
def configured_prometheus(configuration: Mapping[str, Any]) -> Iterator[str]:
    """Base URL of a Prometheus with this configuration. Its port is the kernel's choice, its data live in a folder of
    its own, and it ends with the block. Skips the test if there is no binary."""
    binary = need(prometheus_binary(), "prometheus")
    with tempfile.TemporaryDirectory(prefix="kvferry-prometheus-") as folder:
        port = free_port("127.0.0.1", 0)
        config = Path(folder) / "prometheus.json"
        config.write_text(json.dumps(configuration))
        with open(Path(folder) / "log", "w+") as log:
            server = subprocess.Popen(_command(binary, config, port), stdout=log, stderr=log)
            try:
                url = f"http://127.0.0.1:{port}"
                _wait_ready(server, url, Path(folder) / "log")
                yield url
            finally:
                server.terminate()
                try:
                    server.wait(5)
                except subprocess.TimeoutExpired:
                    server.kill()
                    server.wait()


def _config(targets: Sequence[str], rules: Sequence[Path], labels: Mapping[str, str]) -> dict[str, Any]:
    found = {"targets": list(targets), "labels": dict(labels)}
    return {
        "global": {"scrape_interval": SCRAPE_INTERVAL, "scrape_timeout": SCRAPE_INTERVAL, "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [{"job_name": "kvferry", "static_configs": [found]}],
    }


def _command(binary: Path, config: Path, port: int) -> list[str]:
    return [
        os.fspath(binary),
        f"--config.file={config}",
        f"--storage.tsdb.path={config.parent / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--web.enable-remote-write-receiver",
        "--log.level=warn",
    ]


def _wait_ready(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"prometheus ended with status {server.returncode}: {log.read_text()[-2000:]}")
        try:
            if httpx.get(f"{url}/-/ready", timeout=1.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise TimeoutError(f"prometheus was not ready in {START_TIMEOUT_S:.0f} s: {log.read_text()[-2000:]}")
