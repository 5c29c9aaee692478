"""Names of processes."""

from __future__ import annotations

NodeName = tuple[str, int]
"""Id and epoch of one process."""
NOBODY: NodeName = ("", 0)
