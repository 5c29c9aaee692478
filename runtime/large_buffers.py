"""Has the C library map each large buffer by itself: it then grows without a copy, and its memory is given back."""

from __future__ import annotations

import ctypes

MAPPED_BYTES = 2**20
"""Size from which a buffer is mapped by itself, in bytes."""
KEPT_BYTES = 8 * 2**20
"""Free memory at the end of the heap that stays with the process, in bytes."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""glibc's numbers of the options."""


def map_large_buffers() -> None:
    """Set the thresholds, where the C library has them (glibc).

    By default glibc raises its threshold to the size of the largest buffer that was freed. From then on a body of
    16 MiB that arrives in pieces grows in the heap, and is copied whenever other memory lies behind it."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, MAPPED_BYTES)
        set_option(_TRIM_THRESHOLD, KEPT_BYTES)
