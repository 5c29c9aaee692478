"""Runs a client's checks in the client's own environment: only the standard library, no kvferry.

    CHECK_URL=http://127.0.0.1:8000 CHECK_MODEL=name python harness.py FILE...

A file of checks imports `check`, `URL` and `MODEL` from here. Each check is one line of JSON on stdout:
{"name", "ok", "seconds", "error"}.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

URL = os.environ["CHECK_URL"]
MODEL = os.environ["CHECK_MODEL"]
CHECK_S = float(os.environ.get("CHECK_SECONDS", "60"))
"""What one check may take."""

_checks: list[tuple[str, Callable[[], Any]]] = []


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    """Decorate a function, plain or async, that raises when the check fails. Its name is the check's."""
    _checks.append((function.__name__, function))
    return function


@contextlib.contextmanager
def raises(*kinds: type[BaseException]) -> Iterator[list[BaseException]]:
    """Like pytest's: fails unless one of `kinds` is raised. What was raised is put into the list."""
    caught: list[BaseException] = []
    try:
        yield caught
    except kinds as error:
        caught.append(error)
    else:
        raise AssertionError(f"nothing raised, {' or '.join(kind.__name__ for kind in kinds)} expected")


def run(function: Callable[[], Any], runner: asyncio.Runner, seconds: float) -> str:
    """Empty, or why the check failed. All async checks run in one loop: clients keep connections in it."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"the check took more than {seconds:.0f} s")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        # What a client prints does not belong among the results.
        with contextlib.redirect_stdout(io.StringIO()):
            runner.run(function()) if inspect.iscoroutinefunction(function) else function()
        return ""
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return _told(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _told(error: BaseException) -> str:
    files = {sys.modules[function.__module__].__file__ for _, function in _checks}
    frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename in files]
    place = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno} {frames[-1].line}: " if frames else ""
    return f"{place}{type(error).__name__}: {error}"[:1000]


def main(files: list[str]) -> None:
    for file in files:
        _load(os.path.abspath(file))
    with asyncio.Runner() as runner:
        for name, function in _checks:
            began = time.monotonic()
            error = run(function, runner, CHECK_S)
            result = {"name": name, "ok": not error, "seconds": round(time.monotonic() - began, 3), "error": error}
            print(json.dumps(result), flush=True)


def _load(file: str) -> None:
    name = os.path.basename(file).removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    sys.modules["harness"] = sys.modules[__name__]
    main(sys.argv[1:])
