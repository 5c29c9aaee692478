"""Anonymous memory on huge pages, and its population before it is used. Linux; elsewhere plain pages on first use."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

HUGE_PAGE = 2 << 20
"""Bytes of a huge page."""
_POPULATE_WRITE = 23
"""Linux's MADV_POPULATE_WRITE, since 5.14."""


def map_zeros(num_bytes: int) -> mmap.mmap:
    """Map zeros, aligned to a page, on huge pages if the system has them; a page takes memory once it is written.

    With huge pages first writes fault once per 2 MiB. Raises OSError or OverflowError if the system refuses."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def populate(address: int, num_bytes: int) -> bool:
    """Make the pages from `address`, aligned to a page, resident without changing their content.

    Other threads run and may use the pages meanwhile. False where the system cannot do it, or has no memory left."""
    call = getattr(ctypes.CDLL(None), "madvise", None)
    return call is not None and not call(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _POPULATE_WRITE)
