"""RenderChild: blocking client of a child process that renders chat templates, for probes and outside an event loop."""

from __future__ import annotations

import subprocess
import threading
from types import TracebackType

from kvferry.protocol.errors import ConfigError
from kvferry.router.text.render_frames import (
    COMMAND,
    LENGTH,
    MEMORY_SPENT,
    READY,
    framed,
    length_of,
    minimal_environment,
    parts_of,
)
from kvferry.router.text.rendering import WITHIN_LIMITS

START_S = 30.0
"""Time for the start of a child process, in seconds."""
_MAX_STARTS = 3
"""Maximum number of processes started for a template's probes, which may crash them."""


class RenderChild:
    """Context manager of one process at a time (`render_process`), started if needed and killed after `limit_s`."""

    def __init__(self, sources: bytes, limit_s: float) -> None:
        self._sources, self._limit_s = sources, limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def __enter__(self) -> RenderChild:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def answer(self, content: bytes) -> tuple[bytes, str] | None:
        """Return kind and text of the answer to a request; None if the process has ended.

        Raises ConfigError if the templates do not compile."""
        if self._process is None:
            if self._starts == _MAX_STARTS:
                return None
            self._start()
        found = self._reply(content)
        if found is None:
            self._stop()
        return found

    def _start(self) -> None:
        self._starts += 1
        self._process = process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # an error may quote a prompt
            env=minimal_environment(),
        )
        self._timer = threading.Timer(START_S + self._limit_s, process.kill)
        self._timer.daemon = True
        self._timer.start()
        begun = self._reply(self._sources)
        if begun is None or begun[0] == MEMORY_SPENT:
            raise ConfigError(f"the chat template cannot be compiled {WITHIN_LIMITS}", param="chat_template")
        if begun[0] != READY:
            raise ConfigError(f"the chat template does not parse: {begun[1]}", param="chat_template")

    def _stop(self) -> None:
        if (process := self._process) is not None:
            self._process = None
            self._timer.cancel()
            process.kill()
            process.communicate()

    def _reply(self, content: bytes) -> tuple[bytes, str] | None:
        process = self._process
        assert process is not None
        requests, answers = process.stdin, process.stdout
        assert requests is not None
        assert answers is not None
        try:
            requests.write(framed(content))
            requests.flush()
        except OSError:
            return None
        head = answers.read(LENGTH)
        body = answers.read(length_of(head)) if len(head) == LENGTH else b""
        return parts_of(body) if body and len(body) == length_of(head) else None
