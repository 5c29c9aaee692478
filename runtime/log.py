"""Logging set-up (text or JSON lines on stderr, without prompts or outputs), and a log with a rate limit."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar

REQUEST: ContextVar[str] = ContextVar("request", default="")
"""Id of the request that the current code serves; set where the request arrives."""

TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
NOISY = ("httpx", "httpx2", "httpcore", "httpcore2", "urllib3", "filelock")
OF_CLIENTS = ("uvicorn", "python_multipart")
"""Loggers that warn of client errors. Clients receive those errors, and must not be able to fill the log."""


class JsonFormatter(logging.Formatter):
    """Formatter that writes a record as a JSON object.

    Fields: time (UTC), level, logger, message, request_id if there is one, error (a traceback) if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a JSON object on one line."""
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
    """Log one line per record to stderr; `form` is text or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in NOISY:
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))
    for name in OF_CLIENTS:
        logging.getLogger(name).setLevel(logging.ERROR)


def json_line(line: str, process: str = "") -> str:
    """Return an output line as a JSON object with its process name: a JSON object as it is, other text as `message`."""
    try:
        fields = json.loads(line) if line.startswith("{") else None
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        fields = {"time": shown_time(time.time()), "level": "info", "message": line}
    return json.dumps({**fields, **({"process": process} if process else {})}, ensure_ascii=False)


def shown_time(seconds: float) -> str:
    """Return a Unix time as ISO 8601 in UTC, to the millisecond."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


class RateLimitedLog:
    """Rate-limited log for warnings that clients can cause.

    It logs at most one warning in `every_s` seconds; the next one says how many were suppressed."""

    def __init__(self, log: logging.Logger, every_s: float = 10.0, clock: Callable[[], float] = time.monotonic):
        self._log, self._every_s, self._clock = log, every_s, clock
        self._next_at = -math.inf
        self._left_out = 0

    def warning(self, text: str, *args: object) -> None:
        """Log a warning, or count it as suppressed."""
        now = self._clock()
        if now < self._next_at:
            self._left_out += 1
            return
        more = f" ({self._left_out} more since the last such line)" if self._left_out else ""
        self._next_at, self._left_out = now + self._every_s, 0
        self._log.warning(text + more, *args)
