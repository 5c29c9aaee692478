"""Composition of the 64-bit tag that matches a block with its receive: nonce 24 | transfer 24 | prompt block index 16.

The receiving process gives every connection its own nonce. Nonce 0 belongs to the link itself.
"""

from __future__ import annotations

MAX_NONCE = (1 << 24) - 1
MAX_TRANSFER = (1 << 24) - 1
WARM_TAG = 1
"""Of the block that warms a connection up."""
NEVER_SENT_TAG = 2
MAX_BLOCKS = 1 << 16
"""Blocks of a prompt that one ship can address."""


def block_tag(nonce: int, transfer: int, index: int) -> int:
    """Tag of prompt block `index`; transfer ids beyond 24 bits wrap, which is safe while fewer are alive at once."""
    assert 0 < nonce <= MAX_NONCE, nonce
    assert 0 <= index < MAX_BLOCKS, index
    return nonce << 40 | (transfer & MAX_TRANSFER) << 16 | index


def transfer_of(tag: int) -> int:
    """Return the common part of a transfer's tags: nonce and transfer."""
    return tag >> 16
