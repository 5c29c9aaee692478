"""Compiled functions that decode, validate and join token deltas and first tokens, where they are installed.

Without the extension, or with the variable KVFERRY_PURE, everything is left to Python: decoding to the codec, `plain`
and `plain_first` to `message_validation`, `join` to `delta_queue`. The results are the same, and errors come from
Python alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kvferry.protocol.messages import FirstToken, StepFrame, TokenDelta
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.protocol.wire import code_of, compiled


def _installed() -> ModuleType | None:
    """Return the extension, or None where it is absent or unwanted."""
    if os.environ.get("KVFERRY_PURE"):
        return None
    try:
        from kvferry.protocol import _native
    except ImportError:
        return None
    return _native


native = _installed()
"""The extension, or None."""


def _left_to_python(_: object) -> None:
    """Return None."""


_FOUND = native and native.functions(TokenDelta, code_of(TokenDelta), StepFrame, Reuse, code_of(Reuse), FirstToken)
IS_COMPILED = native is not None
"""Whether the extension is used."""
plain: Callable[[tuple[TokenDelta, ...]], bool | None] = _FOUND[1] if _FOUND else _left_to_python
"""Return whether all deltas are valid and hold no more than tokens; otherwise each is to be checked."""
join: Callable[[list[TokenDelta]], TokenDelta | None] = _FOUND[2] if _FOUND else _left_to_python
"""Return one delta with the tokens of consecutive ones that hold no more than tokens; None for any others."""
plain_first: Callable[[Any], bool | None] = _FOUND[4] if _FOUND else _left_to_python
"""Return whether a message is a valid FirstToken with no more than tokens and an account; otherwise it is checked."""
if _FOUND:
    compiled(code_of(StepFrame), _FOUND[0])
    compiled(code_of(FirstToken), _FOUND[3])
