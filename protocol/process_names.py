"""Type of a process's identity in the cluster: its node id and the epoch of its start."""

from __future__ import annotations

NodeName = tuple[str, int]
"""Node id and epoch of one process."""
NOBODY: NodeName = ("", 0)
"""Name of no process."""
