"""Free list of empty blocks with lookup by id."""

from __future__ import annotations

from collections import OrderedDict


class FreeList:
    """Free list of blocks 0 … num_blocks - 1, all free at first.

    The last block returned is the first one taken, except blocks returned to be taken last: they follow the others,
    oldest first."""

    def __init__(self, num_blocks: int) -> None:
        self._ids = list(range(num_blocks - 1, -1, -1))
        self._places = list(self._ids)
        self._last: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ids) + len(self._last)

    def __contains__(self, block_id: int) -> bool:
        return self._places[block_id] >= 0 or block_id in self._last

    def take(self) -> int:
        """Take a block."""
        if not self._ids:
            return self._last.popitem(last=False)[0]
        block_id = self._ids.pop()
        self._places[block_id] = -1
        return block_id

    def put(self, block_id: int, *, last: bool = False) -> None:
        """Return a block."""
        assert block_id not in self, f"block {block_id} is freed twice"
        if last:
            self._last[block_id] = None
            return
        self._places[block_id] = len(self._ids)
        self._ids.append(block_id)

    def check(self, places: range) -> None:
        """Assert that the list and these places agree; places beyond the end are ignored."""
        for place, block_id in enumerate(self._ids[places.start : places.stop], places.start):
            is_last = self._places[block_id] == place and block_id not in self._last
            assert is_last, f"block {block_id} is free twice"
