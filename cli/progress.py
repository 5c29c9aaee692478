"""What a person sees while a cluster starts: a bar per process on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
from typing import Protocol, TextIO

from tqdm import tqdm


class Progress(Protocol):
    def update(self, name: str, share: float, ready: bool) -> None:
        """The process `name` has loaded this share, 0 to 1, or serves."""

    def echo(self, line: str) -> None:
        """Write a line of output without disturbing what is drawn."""

    def close(self) -> None:
        """Take the drawing away; `echo` goes on working."""


class Bars:
    """For a terminal: bars at the bottom, output scrolls above them."""

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
        for bar in self._bars.values():
            bar.close()

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
    """For a log: a line when a process begins, at every quarter, and when it serves."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._said: dict[str, str] = {}

    def update(self, name: str, share: float, ready: bool) -> None:
        text = f"{name}: ready" if ready else f"{name}: loading, {int(4 * share) * 25} %"
        if self._said.get(name) != text:
            self._said[name] = text
            self.echo(text)

    def echo(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def close(self) -> None:
        pass


def progress_on(stream: TextIO | None = None) -> Progress:
    """The fitting one for this stream (default: stderr)."""
    stream = stream or sys.stderr
    return Bars(stream) if stream.isatty() else Lines(stream)
