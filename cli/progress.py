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
_CHILDS = re.compile(r"\[([\w-]+)\] (.*)")
"""A line that a child printed, behind the child's name."""


class Progress(Protocol):
    """Display of a cluster's start-up progress."""

    def update(self, name: str, share: float, ready: bool) -> None:
        """The process `name` has loaded this share, 0 to 1, or serves."""

    def echo(self, line: str) -> None:
        """Write a line of output without disturbing what is drawn."""

    def close(self) -> None:
        """Take the drawing away; `echo` goes on working."""


class Bars:
    """Progress bars at the bottom of a terminal; output scrolls above them."""

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
    """Progress as log lines: one when a process serves, and at most one every LINE_S seconds before."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._began: dict[str, float] = {}
        self._said: dict[str, float] = {}
        self._serves: set[str] = set()

    def update(self, name: str, share: float, ready: bool) -> None:
        now = self._clock()
        if name not in self._began or (name in self._serves and not ready):
            self._began[name] = self._said[name] = now
            self._serves.discard(name)
        if ready and name not in self._serves:
            self._serves.add(name)
            self.echo(f"{name}: ready after {now - self._began[name]:.1f} s")
        elif not ready and now - self._said[name] >= LINE_S:
            self._said[name] = now
            self.echo(f"{name}: loading, {100 * share:.0f} %")

    def echo(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def close(self) -> None:
        pass


class Objects(Lines):
    """Progress as JSON lines; JSON that a child printed is passed on with the child's name."""

    def echo(self, line: str) -> None:
        found = _CHILDS.fullmatch(line)
        super().echo(json_line(found[2], found[1]) if found else json_line(line))


class EchoHandler(logging.Handler):
    """Log records as lines of output that leave the drawing alone."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.echo(self.format(record))


def log_through(progress: Progress) -> None:
    """From now on this process's log goes through `echo`, in the format that it has."""
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler, logging.StreamHandler):
            echoing = EchoHandler(progress)
            echoing.setFormatter(handler.formatter)
            root.removeHandler(handler)
            root.addHandler(echoing)


def progress_on(stream: TextIO | None = None, form: str = "text") -> Progress:
    """The fitting one for this stream (default: stderr) and this form of the log."""
    stream = stream or sys.stderr
    if form == "json":
        return Objects(stream)
    return Bars(stream) if stream.isatty() else Lines(stream)
