"""UCX tag that matches a sent block with its receive: nonce 24 | transfer 24 | prompt block index 16 bits.

The receiving process gives every connection its own nonce. The link itself uses nonce 0."""

from __future__ import annotations

MAX_NONCE = (1 << 24) - 1
"""Largest nonce: 24 bits."""
MAX_TRANSFER = (1 << 24) - 1
"""Largest transfer id in a tag: 24 bits."""
WARM_TAG = 1
"""Tag of the block that warms up a connection."""
NEVER_SENT_TAG = 2
"""Tag of a receive that is posted only to be cancelled (see ucx_worker)."""
MAX_BLOCKS = 1 << 16
"""Number of prompt blocks that one ship can address."""


def block_tag(nonce: int, transfer: int, index: int) -> int:
    """Return the tag of prompt block `index`.

    Transfer ids beyond 24 bits wrap around, which is safe while fewer transfers are in flight at once."""
    assert 0 < nonce <= MAX_NONCE, nonce
    assert 0 <= index < MAX_BLOCKS, index
    return nonce << 40 | (transfer & MAX_TRANSFER) << 16 | index


def transfer_of(tag: int) -> int:
    """Return the part of a tag that all tags of a transfer share: nonce and transfer."""
    return tag >> 16
