"""The blocks without content, of which each knows its place, so that any can be looked up."""

from __future__ import annotations


class FreeList:
    """Blocks 0 … num_blocks - 1, all free at first. The last one put is the first one taken."""

    def __init__(self, num_blocks: int) -> None:
        self._ids = list(range(num_blocks - 1, -1, -1))
        self._places = list(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, block_id: int) -> bool:
        return self._places[block_id] >= 0

    def take(self) -> int:
        block_id = self._ids.pop()
        self._places[block_id] = -1
        return block_id

    def put(self, block_id: int) -> None:
        assert block_id not in self, f"block {block_id} is freed twice"
        self._places[block_id] = len(self._ids)
        self._ids.append(block_id)

    def check(self, places: range) -> None:
        """Assert that what lies there knows it; of places beyond the end nothing."""
        for place, block_id in enumerate(self._ids[places.start : places.stop], places.start):
            assert self._places[block_id] == place, f"block {block_id} is free twice"
