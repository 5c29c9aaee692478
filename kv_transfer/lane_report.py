"""Reads from UCX's own report (UCX_PROTO_INFO) over which lane blocks of a size and a kind of memory are sent."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf

HEADER = re.compile(r"\| ucp_context_\d+ [^|]*\|\s*(tagged message by ucp_tag_send[^|]*?)\s*\|")
ROW = re.compile(r"\|\s*(\d+[KMG]?)\.\.(\d+[KMG]?|inf)\s*\|\s*(?:\(\?\)\s*)?([^|]+?)\s*\|\s*([^|]+?)\s*\|")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class Lane:
    """Lane of a block. name: UCX's transport and device, "" if unknown. protocol: how it is sent there.

    kind: of the memory, as UCX names it."""

    name: str
    protocol: str
    kind: str

    @property
    def is_direct(self) -> bool:
        """Return whether devices copy from each other, without host memory between them."""
        return any(word in self.name for word in (f"{self.kind}_ipc", "rc_", "dc_"))

    def describe(self) -> str:
        """Return the lane as text for the operator."""
        if not self.name:
            return "over a lane that UCX does not name"
        if self.kind == "host" or self.is_direct:
            return f"over {self.name} ({self.protocol})"
        return f"through host memory, over {self.name} ({self.protocol})"


def lane_of(report: str, size_bytes: int, kind: str) -> Lane:
    """Return the lane for blocks of this size in memory of this kind: host, cuda or rocm."""
    matches = False
    for line in report.splitlines():
        if header := HEADER.search(line):
            matches = f"from {kind}" in header[1]
        elif matches and (row := ROW.search(line)) and _bytes(row[1]) <= size_bytes <= _bytes(row[2]):
            return Lane(row[4], row[3], kind)
    return Lane("", "", kind)


def _bytes(text: str) -> float:
    return inf if text == "inf" else int(text.rstrip("KMG")) * UNITS.get(text[-1], 1)
