"""How long things take, by a seed: most are quick, some are late, a few very late."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random


@dataclass
class Weather:
    """usual_s: of a message's way; late, very_late: shares of those that take thirty and a thousand times as long;
    busy_s: how far loops may be behind."""

    random: Random
    usual_s: float = 0.0005
    late: float = 0.03
    very_late: float = 0.003
    busy_s: float = 0.0
    draws: int = field(default=0)

    @classmethod
    def of(cls, rng: Random) -> Weather:
        usual_s, late = rng.choice([0.0001, 0.0005, 0.005]), rng.choice([0.0, 0.03, 0.15])
        return cls(rng, usual_s, late, rng.choice([0.0, 0.003]), rng.choice([0.0, 0.0, 0.05]))

    def delay_s(self) -> float:
        """Of a message between two processes, or a call between two threads."""
        self.draws += 1
        luck = self.random.random()
        slow = 1000.0 if luck < self.very_late else 30.0 if luck < self.very_late + self.late else 1.0
        return min(2.5, self.random.expovariate(1.0) * self.usual_s * slow)

    def loop_s(self) -> float:
        """By which a busy asyncio loop is behind its node's other threads."""
        return self.busy_s * self.random.random()

    def chance(self, share: float) -> bool:
        return share > 0 and self.random.random() < share
