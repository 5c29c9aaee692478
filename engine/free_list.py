"""Free list of empty blocks with lookup by id."""

from __future__ import annotations

from collections import OrderedDict


class FreeList:
    """Blocks 0 … num_blocks - 1, all free at first.

    The last one put is the first one taken, but those put to be taken last: they follow the others, the oldest first.
    """

    def __init__(self, num_blocks: int) -> None:
        self._ids = list(range(num_blocks - 1, -1, -1))
        self._places = list(self._ids)
        self._last: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ids) + len(self._last)

    def __contains__(self, block_id: int) -> bool:
        return self._places[block_id] >= 0 or block_id in self._last

    def take(self) -> int:
        if not self._ids:
            return self._last.popitem(last=False)[0]
        block_id = self._ids.pop()
        self._places[block_id] = -1
        return block_id

    def put(self, block_id: int, *, last: bool = False) -> None:
        assert block_id not in self, f"block {block_id} is freed twice"
        if last:
            self._last[block_id] = None
            return
        self._places[block_id] = len(self._ids)
        self._ids.append(block_id)

    def check(self, places: range) -> None:
        """Assert that what lies there knows it; of places beyond the end nothing."""
        for place, block_id in enumerate(self._ids[places.start : places.stop], places.start):
            alone = self._places[block_id] == place and block_id not in self._last
            assert alone, f"block {block_id} is free twice"
