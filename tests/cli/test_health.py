"""`kvferry health` asks the process that a container runs."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import kvferry.cli.main as command
from kvferry.cli.health import command_line, url_of
from kvferry.cli.main import kvferry
from kvferry.protocol.errors import ConfigError
from tests.waiting import wait_for


@contextmanager
def container(*words: str) -> Iterator[int]:
    """A process with these words in its command line, behind another's, as an init puts them. The system shows that
    line a moment after the process has begun."""
    process = subprocess.Popen([sys.executable, "-c", "input()", "tini", "--", *words], stdin=subprocess.PIPE)
    try:
        wait_for(lambda: words[-1].encode() in Path(f"/proc/{process.pid}/cmdline").read_bytes())
        yield process.pid
    finally:
        process.kill()
        process.wait()


@contextmanager
def serving(statuses: dict[str, int]) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses[self.path])
            self.end_headers()
            self.wfile.write(b"why")

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def test_it_asks_at_the_address_of_the_process_s_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("/opt/kvferry/bin/kvferry", "prefill", "--host", "0.0.0.0")
    with serving({"/health": 200, "/ready": 503}) as port, container(*words, f"--port={port}") as pid:
        assert command.run(["health", "--pid", str(pid)]) == 0
        assert command.run(["health", "--pid", str(pid), "--ready"]) == 1
    assert f"http://127.0.0.1:{port}/ready answers 503: why" in capsys.readouterr().err


def test_who_does_not_listen_is_not_well(capsys: pytest.CaptureFixture[str]) -> None:
    with container("kvferry", "router", "--port", "1") as pid:
        assert command.run(["health", "--pid", str(pid)]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_variables_count_as_they_do_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_PORT", "8123")
    monkeypatch.setenv("KVFERRY_SSL_CERTFILE", "/tls/chain.pem")
    assert url_of(kvferry, ["router", "--host", "::"]) == "https://[::1]:8123"
    assert url_of(kvferry, ["decode", "--port", "7"]) == "https://127.0.0.1:7"


def test_a_port_that_the_system_chose_is_in_no_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with container("kvferry", "decode", "--port=0") as pid:
        assert command.run(["health", "--pid", str(pid)]) == 2
    said = capsys.readouterr().err
    assert "set one with --port" in said
    assert "does not answer" not in said


def test_a_process_that_is_no_kvferry_is_told() -> None:
    with container("sleep") as pid, pytest.raises(ConfigError, match="is not kvferry"):
        command_line(pid)
    with pytest.raises(ConfigError, match="cannot read"):
        command_line(2**22 + 1)


def test_the_version_is_a_flag_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(["version"]) == 0
    said = capsys.readouterr().out
    assert command.run(["--version"]) == 0
    assert said.startswith(f"{capsys.readouterr().out.strip()} (wire version ")
    assert said.startswith("kvferry 2")
