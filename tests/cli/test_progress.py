"""What a person sees while a cluster starts."""

from __future__ import annotations

import io

from cli.progress import Bars, Lines, progress_on


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_at_quarters_and_when_ready():
    stream = io.StringIO()
    progress = progress_on(stream)
    assert isinstance(progress, Lines)
    for share in (0.0, 0.1, 0.26, 0.3, 0.8, 1.0):
        progress.update("decode-0", share, ready=False)
    progress.update("decode-0", 1.0, ready=True)
    progress.update("decode-0", 1.0, ready=True)
    progress.close()
    progress.echo("[decode-0] hello")
    assert stream.getvalue().splitlines() == [
        "decode-0: loading, 0 %",
        "decode-0: loading, 25 %",
        "decode-0: loading, 75 %",
        "decode-0: loading, 100 %",
        "decode-0: ready",
        "[decode-0] hello",
    ]


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
    length = len(stream.getvalue())
    progress.update("decode-0", 0.9, ready=False)
    assert len(stream.getvalue()) == length, "nothing is drawn after close"
