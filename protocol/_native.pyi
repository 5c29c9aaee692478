"""The compiled extension (kernels/cpu/native/frames.cpp)."""

from collections.abc import Callable

from kvferry.protocol.messages import StepFrame, TokenDelta

def functions(
    delta: type[TokenDelta], code: int, frame: type[StepFrame]
) -> tuple[
    Callable[[bytes], StepFrame | None],
    Callable[[tuple[TokenDelta, ...]], bool],
    Callable[[list[TokenDelta]], TokenDelta | None],
]:
    """Return `decode`, `plain` and `join` (protocol/frames.py); `code` is TokenDelta's number on the wire."""
