"""Start-up progress of a local cluster: one bar per process on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from tqdm import tqdm

from kvferry.runtime.log import json_line

LINE_S = 10.0
"""Minimum interval of progress lines of a process, in seconds."""
_CHILD_LINE = re.compile(r"\[([\w-]+)\] (.*)")
"""Line of a child's output with its name as prefix: `[decode-0] text`."""


class Progress(Protocol):
    """Display of a cluster's start-up progress."""

    def update(self, name: str, share: float, ready: bool) -> None:
        """Show that the process `name` has loaded this share of its model, 0 to 1, or is ready."""

    def echo(self, line: str) -> None:
        """Write a line of output above the bars."""

    def close(self) -> None:
        """Remove the bars; `echo` still works."""


class Bars:
    """Implements `progress.Progress` with bars at the bottom of a terminal; output scrolls above them."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bars: dict[str, tqdm[None]] = {}
        self._open = True
        tqdm.monitor_interval = 0

    def update(self, name: str, share: float, ready: bool) -> None:
        if self._open:
            bar = self._bars.get(name) or self._add(name)
            bar.set_postfix_str("ready" if ready else "loading", refresh=False)
            bar.n = round(100 * share)
            bar.refresh()

    def echo(self, line: str) -> None:
        tqdm.write(line, file=self._stream)

    def close(self) -> None:
        self._open = False
        for bar in reversed(self._bars.values()):
            bar.close()
        self._stream.write("\r")
        self._stream.flush()

    def _add(self, name: str) -> tqdm[None]:
        bar = self._bars[name] = tqdm(
            total=100,
            desc=name,
            position=len(self._bars),
            leave=False,
            file=self._stream,
            bar_format="{desc:<12} |{bar:40}| {n:3d} %{postfix}",
        )
        return bar


class Lines:
    """Log lines, as a `progress.Progress`: one when a process is ready, before that one per LINE_S at most."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._began: dict[str, float] = {}
        self._reported_at: dict[str, float] = {}
        self._ready: set[str] = set()

    def update(self, name: str, share: float, ready: bool) -> None:
        now = self._clock()
        if name not in self._began or (name in self._ready and not ready):
            self._began[name] = self._reported_at[name] = now
            self._ready.discard(name)
        if ready and name not in self._ready:
            self._ready.add(name)
            self.echo(f"{name}: ready after {now - self._began[name]:.1f} s")
        elif not ready and now - self._reported_at[name] >= LINE_S:
            self._reported_at[name] = now
            self.echo(f"{name}: loading, {100 * share:.0f} %")

    def echo(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def close(self) -> None:
        pass


class JsonLines(Lines):
    """Implements `progress.Progress` with JSON lines; a child's JSON line gets the child's name."""

    def echo(self, line: str) -> None:
        found = _CHILD_LINE.fullmatch(line)
        super().echo(json_line(found[2], found[1]) if found else json_line(line))


class EchoHandler(logging.Handler):
    """Log handler that writes records through `Progress.echo`, so that they do not garble the bars."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as a line of output."""
        self._progress.echo(self.format(record))


def log_through(progress: Progress) -> None:
    """Route this process's log through `progress.echo`; handlers keep their format."""
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler, logging.StreamHandler):
            echo_handler = EchoHandler(progress)
            echo_handler.setFormatter(handler.formatter)
            root.removeHandler(handler)
            root.addHandler(echo_handler)


def progress_on(stream: TextIO | None = None, form: str = "text") -> Progress:
    """Return the display for a stream (default: stderr) and a log format (`text` or `json`)."""
    stream = stream or sys.stderr
    if form == "json":
        return JsonLines(stream)
    return Bars(stream) if stream.isatty() else Lines(stream)
