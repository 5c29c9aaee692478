"""Logging set-up: text or JSON lines on stderr, without prompts or outputs."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar

REQUEST: ContextVar[str] = ContextVar("request", default="")
"""Id of the request on whose behalf code runs; set where one comes in."""

TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
NOISY = ("httpx", "httpx2", "httpcore", "httpcore2", "urllib3", "filelock")
OF_CLIENTS = ("uvicorn", "python_multipart")
"""They warn of what a client did wrong, which is told to the client: a log that it could fill is no log."""


class JsonFormatter(logging.Formatter):
    """One object per record: time (UTC), level, logger, message, request_id where there is one, error (a traceback)."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": shown_time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request := getattr(record, "request_id", REQUEST.get()):
            fields["request_id"] = request
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def set_up_log(level: str, form: str = "text") -> None:
    """One line per record on stderr; `form` is text or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in NOISY:
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))
    for name in OF_CLIENTS:
        logging.getLogger(name).setLevel(logging.ERROR)


def json_line(line: str, process: str = "") -> str:
    """A line of output as an object: itself if it is one, else its text; with the name of the process it came from."""
    try:
        fields = json.loads(line) if line.startswith("{") else None
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        fields = {"time": shown_time(time.time()), "level": "info", "message": line}
    return json.dumps({**fields, **({"process": process} if process else {})}, ensure_ascii=False)


def shown_time(seconds: float) -> str:
    """ISO 8601 in UTC, to the millisecond."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


class RateLimitedLog:
    """Warnings that anybody outside can cause: at most one in `every_s` seconds, the next of which tells how many were
    left out."""

    def __init__(self, log: logging.Logger, every_s: float = 10.0, clock: Callable[[], float] = time.monotonic):
        self._log, self._every_s, self._clock = log, every_s, clock
        self._next_at = -math.inf
        self._left_out = 0

    def warning(self, text: str, *args: object) -> None:
        now = self._clock()
        if now < self._next_at:
            self._left_out += 1
            return
        more = f" ({self._left_out} more since the last such line)" if self._left_out else ""
        self._next_at, self._left_out = now + self._every_s, 0
        self._log.warning(text + more, *args)
