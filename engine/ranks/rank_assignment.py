"""RankAssignment: one rank's group of collective operations, and the shard of the model that it loads."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.engine.ranks.group import Group
from kvferry.engine.ranks.shard import Shard


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """Assignment of one rank.

    group: collective operations with the other ranks; whole_experts: see `Shard`."""

    group: Group
    whole_experts: bool = False

    @property
    def shard(self) -> Shard:
        """Return the rank's shard."""
        return Shard(self.group.rank, self.group.ranks, self.whole_experts)
