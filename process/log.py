"""How a process logs: a line of text or of JSON per record, on stderr. No record holds a prompt or an output."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar

REQUEST: ContextVar[str] = ContextVar("request", default="")
"""Id of the request on whose behalf code runs; set where one comes in."""

TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
NOISY = ("httpx", "httpx2", "httpcore", "httpcore2", "urllib3", "filelock", "uvicorn")


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
