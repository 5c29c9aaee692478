"""Restarts, reports and ends, with one-line programs as children."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from itertools import pairwise

import pytest

from kvferry.cli.bootstrap import StartupFailed
from kvferry.cli.child import Child, Command
from kvferry.cli.supervisor import Backoff, Supervisor, describe
from kvferry.protocol.errors import ConfigError

SERVE = "import os, sys, time; os.write(int(os.environ['KVFERRY_STATUS_FD']), b'{}'); time.sleep({})"
READY = '{"status": "ready", "url": "http://x"}\\n'


def python(code: str, name: str = "child-0", **options) -> Command:
    return Command(name, (sys.executable, "-S", "-c", code), **options)


def serving(seconds: float) -> str:
    return SERVE.format(READY, seconds)


class Listening(Supervisor):
    def __init__(self) -> None:
        self.lines: list[str] = []
        super().__init__(self.lines.append, lambda child: None, lambda: Backoff(0.05, 0.2, 60))


@pytest.fixture
async def supervisor():
    made = Listening()
    yield made
    await made.stop(grace_s=0.2)


def test_backoff_doubles_to_its_most_and_starts_again_after_health():
    backoff = Backoff()
    assert [backoff.after(0) for _ in range(7)] == [0.5, 1, 2, 4, 8, 10, 10]
    assert backoff.after(59) == 10
    assert backoff.after(60) == 0.5
    assert backoff.after(0) == 1


def test_exit_statuses_in_words():
    assert describe(3) == "exit status 3"
    assert describe(-15) == "SIGTERM"
    assert describe(-9) == "SIGKILL: out of memory?"
    assert describe(-250) == "signal 250"


async def test_readiness_and_output_reach_the_supervisor(supervisor):
    child = supervisor.start(python("print('hello'); " + serving(60)))
    await asyncio.wait_for(supervisor.ready([child]), 10)
    assert (child.url, child.progress, child.ever_ready) == ("http://x", 1.0, True)


async def test_output_carries_the_name_and_survives_bad_bytes_and_long_lines():
    lines: list[str] = []
    code = "import sys; w = sys.stdout.buffer.write; w(b'\\xff!\\n'); w(b'x' * 3_000_000 + b'\\n'); w(b'last')"
    status = await Child(python(code), lines.append, lambda child: None).run_once()
    assert status == 0
    assert lines[0] == "[child-0] \ufffd!"
    assert lines[-1] == "[child-0] last"
    assert max(map(len, lines)) < 2_000_000


async def test_a_child_may_be_nicer_than_its_supervisor():
    lines: list[str] = []
    command = python("import os; print(os.nice(0))", niceness=3)
    assert await Child(command, lines.append, lambda child: None).run_once() == 0
    assert lines == [f"[child-0] {os.nice(0) + 3}"]


async def test_unreadable_reports_are_shown_and_ignored():
    lines: list[str] = []
    code = "import os; os.write(int(os.environ['KVFERRY_STATUS_FD']), b'nonsense\\n[]\\n')"
    child = Child(python(code), lines.append, lambda child: None)
    assert await child.run_once() == 0
    assert len([line for line in lines if "unreadable status report" in line]) == 2
    assert not child.ever_ready


async def test_a_grandchild_that_keeps_the_pipes_does_not_delay_the_end():
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '5']).pid)"
    lines: list[str] = []
    began = time.monotonic()
    assert await Child(python(code), lines.append, lambda child: None).run_once() == 0
    took = time.monotonic() - began
    os.kill(int(lines[0].split()[-1]), signal.SIGKILL)
    assert took < 4


async def test_restarts_follow_the_backoff_however_often(supervisor):
    heard: asyncio.Queue[str] = asyncio.Queue()
    supervisor._echo = heard.put_nowait
    supervisor.start(python("import time; print(time.monotonic(), flush=True); " + serving(0)))
    async with asyncio.timeout(20):
        starts = [float((await heard.get()).split()[-1]) for _ in range(5)]
    gaps = [later - sooner for sooner, later in pairwise(starts)]
    assert all(gap >= least for gap, least in zip(gaps, (0.05, 0.1, 0.2, 0.2), strict=True)), gaps
    assert not supervisor.failure.done(), "once ready, a child is restarted for ever"


async def test_status_2_before_ready_is_the_cluster_s_failure(supervisor):
    supervisor.start(python("print('kvferry: error: lower --kv-cache-gib'); raise SystemExit(2)"))
    with pytest.raises(ConfigError, match="child-0: lower --kv-cache-gib"):
        await asyncio.wait_for(supervisor.failure, 10)
    assert supervisor.lines == []


async def test_a_complaint_with_another_status_is_shown(supervisor):
    supervisor.start(python("print('kvferry: error: no nodes'); raise SystemExit(1)"))
    with pytest.raises(StartupFailed, match="child-0 ended 3 times before it was ready"):
        await asyncio.wait_for(supervisor.failure, 10)
    assert supervisor.lines == ["[child-0] kvferry: error: no nodes"] * 2
    assert "no nodes" in str(supervisor.failure.exception())


@pytest.mark.parametrize(("end", "status"), [("raise SystemExit(7)", 7), ("os.kill(os.getpid(), 15)", 143), ("", 1)])
async def test_three_failed_starts_end_the_cluster_with_the_last_words_and_the_status(supervisor, end, status):
    supervisor.start(python(f"import os; print('Boom: too deep', flush=True); print(flush=True); {end}"))
    with pytest.raises(
        StartupFailed, match=r"child-0 ended 3 times before it was ready \(.*\): Boom: too deep$"
    ) as caught:
        await asyncio.wait_for(supervisor.failure, 10)
    assert caught.value.exit_status == status
    assert supervisor.lines == ["[child-0] Boom: too deep"] * 3


async def test_status_2_without_an_error_line_says_the_last_line(supervisor):
    supervisor.start(python("print('Usage: nonsense'); raise SystemExit(2)"))
    with pytest.raises(ConfigError, match="child-0: Usage: nonsense"):
        await asyncio.wait_for(supervisor.failure, 10)


async def test_a_command_that_is_not_there_is_a_failure(supervisor):
    supervisor.start(Command("child-0", ("/no/such/program",)))
    with pytest.raises(FileNotFoundError):
        await asyncio.wait_for(supervisor.failure, 10)


async def test_stop_ends_the_stubborn_and_those_that_others_need_last(supervisor):
    order: list[str] = []
    note = "import signal, sys; signal.signal(15, lambda *a: (print('bye'), sys.exit())); "
    stubborn = "import signal; signal.signal(15, signal.SIG_IGN); "
    supervisor._echo = order.append
    children = [
        supervisor.start(python(note + serving(60), "store", ends_last=True)),
        supervisor.start(python(note + serving(60), "worker")),
        supervisor.start(python(stubborn + serving(60), "mule")),
    ]
    await asyncio.wait_for(supervisor.ready(children), 10)
    began = time.monotonic()
    await supervisor.stop(grace_s=0.5)
    assert time.monotonic() - began < 2
    assert order == ["[worker] bye", "[store] bye"]
    assert [child.pid for child in children] == [None, None, None]


async def test_ctrl_c_does_not_reach_those_that_others_need(supervisor):
    child = supervisor.start(
        python("print('up', flush=True); import time; time.sleep(60)", reports=False, ends_last=True)
    )
    while not supervisor.lines:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    pid = child.pid
    os.kill(pid, signal.SIGINT)
    await asyncio.sleep(0.3)
    assert child.pid == pid
    await supervisor.stop(grace_s=5)
    assert child.pid is None


async def test_stop_in_the_middle_of_a_start_and_of_a_backoff(supervisor):
    waiting = supervisor.start(python(serving(0), "waiting"))
    await asyncio.wait_for(waiting.ready.wait(), 10)
    starting = supervisor.start(python(serving(60), "starting"))
    await asyncio.sleep(0)
    await supervisor.stop(grace_s=1.0)
    assert waiting.pid is None
    assert starting.pid is None
