"""`kvferry` as a test-only program: its own command line, in a process that does on demand what faults do to it.

A thread listens on the socket `$CHAOS_DIR/$CHAOS_NAME.sock`: one JSON object and its answer per connection. It hangs
threads, breaks the link (fault_injection), jumps the clock, ends or stops the process at the n-th block of a ship,
and reads the books. CHAOS_STEP_MS and CHAOS_TOKEN_US pace its engine's steps (paced_steps).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from tests.chaos.queues import log_queues
from tests.chaos.tracing import log_spans
from tests.chaos.weather import Weather
from tests.paced_steps import pace_steps

HOME, NAME = Path(os.environ["CHAOS_DIR"]), os.environ["CHAOS_NAME"]
STEP_S, TOKEN_S = (float(os.environ.get(name, "0")) for name in ("CHAOS_STEP_MS", "CHAOS_TOKEN_US"))
STEP_S, TOKEN_S = STEP_S / 1e3, TOKEN_S / 1e6
ANSWER_S = 5.0


class Parts:
    """What of this process a fault needs a handle on; None until it exists."""

    loop: Any = None
    engine: Any = None
    link: Any = None
    adapter: Any = None


class Clock:
    """Wall clock with an offset, which a restarted process has as well, as a machine would."""

    def __init__(self, path: Path) -> None:
        self._path, self._time, self._time_ns = path, time.time, time.time_ns
        self.offset_s = float(path.read_text()) if path.exists() else 0.0
        time.time = lambda: self._time() + self.offset_s
        time.time_ns = lambda: self._time_ns() + int(self.offset_s * 1e9)

    def jump(self, offset_s: float) -> None:
        self._path.write_text(str(offset_s))
        self.offset_s = offset_s


PARTS, WEATHER = Parts(), Weather(NAME)
CLOCK = Clock(HOME / f"{NAME}.clock")


def prepare_worker() -> None:
    """Put the handles in, before anything of the worker is imported that would hold what they replace."""
    from kvferry.cli.bootstrap import set_threads

    set_threads(1)
    import kvferry.engine.loop
    import kvferry.worker.link_factory
    from tests.chaos.weather import StormyLink

    real = kvferry.worker.link_factory.UcxLink  # type: ignore[attr-defined]

    def make_link(*args: Any, **options: Any) -> Any:
        PARTS.link = StormyLink(real(*args, **options), WEATHER)
        return PARTS.link

    kvferry.worker.link_factory.UcxLink = make_link  # type: ignore[assignment, attr-defined]
    start = kvferry.engine.loop.EngineLoop.start

    def started(self: Any) -> None:
        PARTS.engine = self
        start(self)

    pace_steps(STEP_S, TOKEN_S)
    kvferry.engine.loop.EngineLoop.start = started  # type: ignore[method-assign]


def prepare_adapter() -> None:
    import kvferry.engine_adapter.node

    run = kvferry.engine_adapter.node.AdapterNode.run

    async def noted(self: Any, stop: Any) -> bool:
        PARTS.adapter = self
        return await run(self, stop)

    kvferry.engine_adapter.node.AdapterNode.run = noted  # type: ignore[method-assign]


def hang(thread: str, seconds: float) -> None:
    """Keep one of the threads from doing anything, as a call that does not return would."""
    if thread == "engine":
        PARTS.engine.submit(lambda _: time.sleep(seconds))
    elif thread == "link":
        PARTS.link.submit(lambda: time.sleep(seconds))
    else:
        PARTS.loop.call_soon_threadsafe(time.sleep, seconds)


def sever() -> None:
    """Break every connection of the link under its owner."""
    from kvferry.protocol.errors import NodeLost

    link = PARTS.link
    link.submit(lambda: [link.sever(peer, NodeLost("cut by the test")) for peer in list(link.met)])


def at_block(blocks: int, number: int) -> None:
    """Send this process a signal when the n-th block from now passes through its link."""
    WEATHER.then, WEATHER.blocks_left = number, blocks


def books() -> dict[str, Any]:
    """Who holds blocks for what, and whether anything is under way, as the engine thread sees it."""
    found: dict[str, Any] = {}
    if PARTS.adapter is not None and PARTS.adapter.state is not None:
        running = PARTS.adapter.state.attempts.running
        return {"holds": {}, "available": 0, "size": 0, "waiting": bool(running), "transfer_holds": 0}
    if PARTS.engine is None:
        return found
    seen = threading.Event()

    def read(engine: Any) -> None:
        pool = engine.pool
        held = {reason: sum(map(len, book.values())) for reason, book in pool.holds._pages.items()}
        found.update(holds=held, available=pool.available, size=pool.num_blocks)
        found.update(waiting=bool(engine.request_table), transfer_holds=bool(engine.transfer_holds))
        seen.set()

    PARTS.engine.submit(read)
    if not seen.wait(ANSWER_S):
        found["hung"] = True
    return found


DEEDS: dict[str, Any] = {
    "hang": hang, "sever": sever, "at_block": at_block, "books": books, "weather": WEATHER.set, "clock": CLOCK.jump,
}  # fmt: skip


def obey(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rw") as words:
            try:
                asked = json.loads(words.readline())
                answer = {"answer": DEEDS[asked.pop("deed")](**asked)}
            except Exception as error:
                answer = {"error": repr(error)}
            try:
                words.write(json.dumps(answer) + "\n")
                words.flush()
            except OSError:
                continue


def listen() -> None:
    path = HOME / f"{NAME}.sock"
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)
    threading.Thread(target=obey, args=(listener,), name="chaos", daemon=True).start()


def main() -> None:
    import sys

    import uvloop

    run = uvloop.run

    async def noted(main: Coroutine[Any, Any, None]) -> None:
        import asyncio

        PARTS.loop = asyncio.get_running_loop()
        await main

    uvloop.run = lambda main: run(noted(main))
    listen()
    log_spans(HOME / f"{NAME}.spans")
    log_queues(HOME / f"{NAME}.queues", lambda: PARTS.engine)
    prepare = {"router": lambda: None, "adapt": prepare_adapter}.get(sys.argv[1], prepare_worker)
    prepare()
    from kvferry.cli.main import main as kvferry

    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    kvferry()


if __name__ == "__main__":
    main()
