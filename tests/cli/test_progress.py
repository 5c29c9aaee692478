"""What a person sees while a cluster starts."""

from __future__ import annotations

import io
import logging

from kvferry.cli.progress import Bars, Lines, log_through, progress_on


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_when_ready_and_a_few_meanwhile():
    stream, now = io.StringIO(), [0.0]
    progress = Lines(stream, lambda: now[0])
    for tick in range(101):
        now[0] = tick / 4
        progress.update("decode-0", tick / 100, ready=False)
    progress.update("decode-0", 1.0, ready=True)
    progress.update("decode-0", 1.0, ready=True)
    progress.update("router", 0.0, ready=False)
    now[0] += 2
    progress.update("router", 1.0, ready=True)
    progress.close()
    progress.echo("[decode-0] hello")
    assert stream.getvalue().splitlines() == [
        "decode-0: loading, 40 %",
        "decode-0: loading, 80 %",
        "decode-0: ready after 25.0 s",
        "router: ready after 2.0 s",
        "[decode-0] hello",
    ]
    now[0] += 100
    progress.update("decode-0", 0.5, ready=False)
    now[0] += 3
    progress.update("decode-0", 1.0, ready=True)
    assert stream.getvalue().endswith("hello\ndecode-0: ready after 3.0 s\n"), "a restart counts from its own start"
    assert isinstance(progress_on(stream), Lines)


def test_bars_on_a_terminal():
    stream = Terminal()
    progress = progress_on(stream)
    assert isinstance(progress, Bars)
    progress.update("router", 1.0, ready=True)
    progress.update("decode-0", 0.4, ready=False)
    progress.echo("[decode-0] hello")
    drawn = stream.getvalue()
    assert "router" in drawn
    assert "100 %, ready" in drawn
    assert " 40 %, loading" in drawn
    assert "[decode-0] hello\n" in drawn
    progress.close()
    assert stream.getvalue().endswith("\r"), "what follows begins at the left"
    length = len(stream.getvalue())
    progress.update("decode-0", 0.9, ready=False)
    assert len(stream.getvalue()) == length, "nothing is drawn after close"


def test_the_log_goes_above_the_bars():
    stream, root = Terminal(), logging.getLogger()
    handlers = root.handlers[:]
    root.handlers[:] = [logging.StreamHandler()]
    root.handlers[0].setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    try:
        log_through(progress_on(stream))
        logging.getLogger("kvferry.cli.supervisor").warning("decode-0 ended")
    finally:
        root.handlers[:] = handlers
    assert "WARNING decode-0 ended\n" in stream.getvalue()
