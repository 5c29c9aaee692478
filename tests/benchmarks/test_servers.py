"""Servers of one line: started, found ready, measured, and ended with their children."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.servers import StartError, cpu_seconds, environment, free_port, memory_gb, running, stopped
from benchmarks.subjects import Launch

ANSWERS = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "a-model"}]}')
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_ready_once_it_answers_and_ends_with_its_children(tmp_path: Path) -> None:
    port = free_port()
    launch = Launch((sys.executable, "-c", ANSWERS, str(port)), "/health")
    with running(launch, port, tmp_path / "log") as server:
        family = server.processes()
        assert len(family) == 2
        assert server.target.model == "a-model"
        assert server.ready_s > 0
        resident, proportional = memory_gb(family)
        assert resident > proportional > 0
        assert cpu_seconds(family) > 0
    assert not any(process.is_running() for process in psutil.wait_procs(family, 5)[1])
    assert memory_gb(family) == (0, 0)


def test_a_server_that_ends_shows_the_end_of_its_log(tmp_path: Path) -> None:
    launch = Launch((sys.executable, "-c", "print('no such instruction'); raise SystemExit(1)"), "/health")
    before = psutil.Process(os.getpid()).children()
    with pytest.raises(StartError, match="no such instruction"), running(launch, free_port(), tmp_path / "log"):
        pass
    assert psutil.Process(os.getpid()).children() == before


def test_a_server_does_not_inherit_how_our_threads_wait(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("KEPT", "1")
    found = environment(Launch(("true",), "/health", {"OMP_NUM_THREADS": "3"}))
    assert (found.get("OMP_WAIT_POLICY"), found["OMP_NUM_THREADS"], found["KEPT"]) == (None, "3", "1")


def test_a_stopped_server_runs_again_afterwards_and_one_that_ended_is_no_error(tmp_path: Path) -> None:
    port = free_port()
    launch = Launch((sys.executable, "-c", ANSWERS, str(port)), "/health")
    with running(launch, port, tmp_path / "log") as server:
        family = server.processes()
        with stopped(family):
            until = time.monotonic() + 10
            while not all(process.status() == psutil.STATUS_STOPPED for process in family):
                assert time.monotonic() < until, "the server was not stopped"
                time.sleep(0.01)
            family[1].kill()
        assert server.process.status() != psutil.STATUS_STOPPED
        assert httpx.get(server.target.url, trust_env=False).status_code == 200
