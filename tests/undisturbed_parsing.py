"""Garbage is not collected while Python source is parsed.

Before Python 3.13 a finaliser that itself parses makes `ast.parse` fail with "AST constructor recursion depth mismatch"
(CPython's issue 106905): a task whose exception nobody retrieved logs a traceback when it is collected, which parses
lines to underline them. pytest and Hypothesis parse sources to show a failure; that ended whole runs."""

from __future__ import annotations

import ast
import gc
from typing import Any

_parse = ast.parse


def parse(*args: Any, **kwargs: Any) -> Any:
    """Return what `ast.parse` does."""
    if not gc.isenabled():
        return _parse(*args, **kwargs)
    gc.disable()
    try:
        return _parse(*args, **kwargs)
    finally:
        gc.enable()


def parse_undisturbed() -> None:
    """Keep the garbage collector off `ast.parse` in this process."""
    ast.parse = parse
