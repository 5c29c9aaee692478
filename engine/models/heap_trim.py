"""Returns free heap memory to the system (glibc's malloc_trim) after a model is loaded."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Give freed memory back to the system, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
