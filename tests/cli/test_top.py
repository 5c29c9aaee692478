"""`kvferry top`: pictures of a state, live in a terminal of its own, and as text for a pipe."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from rich.console import Console

import kvferry.cli.main as command
from kvferry.cli.top import StateUnavailable, TopOptions, run_top
from kvferry.cli.top_view import BAR, pool, render, spark
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.settings import RouterSettings
from kvferry.router.dashboard.state import Blocks, State
from tests.api_parts import FakeCluster, app_of, demo_text, says, served
from tests.dashboard_states import ScriptedBoard, busy, hostile


@contextmanager
def router(board: ScriptedBoard, **settings: Any) -> Iterator[str]:
    app = app_of(FakeCluster(says("x")), demo_text(), RouterMetrics(), RouterSettings(**settings), board=board)  # type: ignore[arg-type]
    with served(app) as url:
        yield url


def drawn(state: State, width: int = 160, height: int = 10_000) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(state, width, height))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_picture_shows_what_the_page_shows() -> None:
    shown = drawn(busy())
    for part in (
        "router-3f9c0a61d2b4", "up 1 h 23 m", "in flight 3", "suspected", "quarantined: prefill-0 → decode-2",
        "61 MB/s", "41 ships", "9 copies", "3 migrations", "429 overloaded 15", "503 no nodes 5",
        "another decode 2", "chat-0008", "another decode", "another tenant's", "team-a", "2 (1,840 tokens)",
        "evicted", "overloaded", "prefill-1 → decode-1",
    ):  # fmt: skip
        assert part in shown, (part, shown)
    assert "\x1b" not in shown, "no colours where there is no terminal"


def test_a_picture_fits_its_screen() -> None:
    state = busy()
    many = state.model_copy(
        update={"recent": state.recent * 8, "running": state.running * 6, "events": state.events * 9}
    )
    for height in (30, 40, 60):
        lines = drawn(many, 120, height).splitlines()
        assert len(lines) <= max(height, 40), height
        assert max(map(len, lines)) <= 120
    assert len(drawn(many).splitlines()) > 90


def test_what_is_wanted_least_is_left_out_where_there_is_little_room() -> None:
    wide, narrow = drawn(busy(), 150), drawn(busy(), 90)
    assert "tokens/s   step" in wide
    assert "step" not in narrow
    for line in (line for line in narrow.splitlines() if line.startswith(("prefill-", "decode-", "chat-"))):
        assert "…" not in line, line


def test_names_move_no_cursor_and_mean_no_markup() -> None:
    shown = drawn(hostile(), 2000)
    assert "\x1b" not in shown
    assert shown.count("[bold]") > 10
    assert "<img src=x" in shown


def test_a_bar_shows_all_that_there_is() -> None:
    node = busy().nodes[0]
    full = node.model_copy(update={"blocks": Blocks(active=1, cached=997, granted=1, free=1, total=1000)})
    assert pool(full).plain == "█▓" + "▒" * (BAR - 2)
    empty = node.model_copy(update={"blocks": Blocks(active=0, cached=0, granted=0, free=0, total=0)})
    assert pool(empty).plain == "·" * BAR
    assert spark(busy().points) == "".join(sorted(spark(busy().points)))
    assert len(spark(busy().points)) == 40
    assert spark(busy().points[:41])[-1] == "▃"
    assert spark([]) == ""


def test_once_prints_one_picture(capsys: pytest.CaptureFixture[str]) -> None:
    with router(ScriptedBoard(busy()), api_key="secret") as url:
        assert command.run(["top", "--url", url, "--once", "--api-key", "secret"]) == 0
        assert "decode-1" in capsys.readouterr().out
        assert command.run(["top", "--url", f"{url}/", "--api-key", "secret"]) == 0, "no terminal: one picture too"
        assert "decode-1" in capsys.readouterr().out
        assert command.run(["top", "--url", url, "--once"]) == 1
        assert "--api-key" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nowhere", "http://[", "ftp://x"])
def test_no_router_is_one_line_and_status_1(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(["top", "--url", url, "--once"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert url in line


def test_another_server_is_no_router() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"<html>"})

    with served(app) as url, pytest.raises(StateUnavailable, match="not a router of this version"):
        run_top(TopOptions(url, "", 1.0), once=True)


def test_a_terminal_shows_it_live_until_q_is_pressed() -> None:
    board = ScriptedBoard(busy())
    with router(board) as url:
        ours, theirs = pty.openpty()
        argv = [sys.executable, "-m", "kvferry.cli.main", "top", "--url", url, "--interval", "0.2"]
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "150", "LINES": "50"}
        process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        try:
            read_until(ours, b"router-3f9c0a61d2b4")
            board.shows = busy(router="router-restarted")
            read_until(ours, b"router-restarted")
            os.write(ours, b"xq")
            rest = read_until(ours, b"\x1b[?1049l")
            assert process.wait(20) == 0, rest
        finally:
            process.kill()
            process.wait()
            os.close(ours)


def test_a_router_that_stops_answering_is_waited_for() -> None:
    board = ScriptedBoard(busy())
    ours, theirs = pty.openpty()
    try:
        with router(board) as url:
            argv = [sys.executable, "-m", "kvferry.cli.main", "top", "--url", url, "--interval", "0.2"]
            environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "150", "LINES": "50"}
            process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
            read_until(ours, b"router-3f9c0a61d2b4")
        read_until(ours, b"no answer from")
        os.write(ours, b"q")
        read_until(ours, b"\x1b[?1049l")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def read_until(terminal: int, wanted: bytes, limit_s: float = 60.0) -> bytes:
    """What the terminal was told, up to these bytes."""
    seen, until = b"", time.monotonic() + limit_s
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, until - time.monotonic()))
        assert ready, seen[-3000:]
        seen += os.read(terminal, 65_536)
    return seen
