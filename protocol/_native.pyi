"""The compiled extension (kernels/cpu/native/frames.cpp and jpeg_markers.cpp)."""

from collections.abc import Callable
from typing import Any

from kvferry.protocol.messages import FirstToken, StepFrame, TokenDelta
from kvferry.protocol.prefix_reuse import Reuse

def functions(
    delta: type[TokenDelta],
    delta_code: int,
    frame: type[StepFrame],
    reuse: type[Reuse],
    reuse_code: int,
    first: type[FirstToken],
) -> tuple[
    Callable[[bytes], StepFrame | None],
    Callable[[tuple[TokenDelta, ...]], bool],
    Callable[[list[TokenDelta]], TokenDelta | None],
    Callable[[bytes], FirstToken | None],
    Callable[[Any], bool],
]:
    """Return `decode`, `plain`, `join`, `decode_first`, `plain_first` (protocol/frames.py).

    delta_code, reuse_code: the classes' numbers on the wire."""

def find_marker(data: bytes, at: int, end: int) -> int:
    """Return the place in [at, end) where the next marker of a JPEG begins, or -1 (router/media/jpeg_scans.py)."""
