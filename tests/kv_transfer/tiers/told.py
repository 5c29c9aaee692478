"""What tiers tell of their blocks."""

from collections.abc import Iterable


def blocks(rows: Iterable[bytes]) -> list[bytes]:
    """Hashes that end in eight zeros, by their rows."""
    return [row[9:] + bytes(8) if row[0] else row[1:] for row in rows]
