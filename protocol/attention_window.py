"""`first_seen`: first position that a token attends to in a sliding window (Mistral) or a fixed chunk (Llama 4)."""

from __future__ import annotations


def first_seen(position: int, window: int) -> int:
    """Return the first position that a token at `position` attends to.

    window > 0: the last `window` positions, the token's own included. window < 0: the positions since the last multiple
    of -window. 0: all."""
    if window < 0:
        return position // -window * -window
    return max(position - window + 1, 0) if window else 0
