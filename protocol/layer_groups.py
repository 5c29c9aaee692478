"""Division of a model's layers into groups by how long their K/V live: full attention, and attention windows."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.attention_window import first_seen


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Division of a model's cached layers into groups, each with pool blocks of its own.

    A block holds the K/V of block_size tokens over `full` layers. Layers that attend to all tokens fill one, which is
    the block of a sequence's chain. Those with windows are divided into `count` groups of as many layers, the last one
    perhaps smaller; one block of each makes a page. A sequence needs the pages of its last `window` tokens alone.

    windows: of each cached layer (`protocol.attention_window`), 0 for those that attend to all; both kinds occur. A
    layer that attends in chunks keeps as many tokens as a window of that length, wherever its chunk began."""

    windows: tuple[int, ...]

    @property
    def full(self) -> int:
        """Return the layers of one block: as many as attend to all tokens."""
        return self.windows.count(0)

    @property
    def count(self) -> int:
        """Return the groups of layers with windows, which are the blocks of a page."""
        return -(-(len(self.windows) - self.full) // self.full)

    @property
    def window(self) -> int:
        """Return the longest window, in tokens."""
        return max(map(abs, self.windows))

    def places(self) -> list[tuple[int | None, int]]:
        """Return the group of each layer, None for those that attend to all tokens, and its place in a block."""
        places: list[tuple[int | None, int]] = []
        full = windowed = 0
        for window in self.windows:
            if window:
                places.append((windowed // self.full, windowed % self.full))
                windowed += 1
            else:
                places.append((None, full))
                full += 1
        return places

    def first_page(self, tokens: int, block_size: int) -> int:
        """Return the first page that a sequence of `tokens` needs to continue, or from its last full block on."""
        return first_seen(tokens // block_size * block_size, self.window) // block_size

    def max_pages(self, block_size: int) -> int:
        """Return the maximum number of pages that a sequence needs, including a partly used one."""
        return -(-(self.window - 1) // block_size) + 1

    def blocks(self, tokens: int, block_size: int) -> int:
        """Return the pool blocks that a sequence of `tokens` tokens takes: its chain and the pages of its window."""
        chain = -(-tokens // block_size)
        return chain + self.count * (chain - self.first_page(tokens, block_size))
