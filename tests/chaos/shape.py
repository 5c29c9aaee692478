"""How a disturbed cluster is run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.chaos.engines import EngineShape
from tests.chaos.plan import DECODES, ENGINES, Roster

MODEL, SECRET = "chaos", "the secret of a disturbed cluster"


@dataclass(frozen=True, slots=True)
class Shape:
    """How the cluster is run. model: "tiny" (a random one, of which many fit on a small machine) or what --model takes;
    step_ms, token_us: least length of a step, see disturbed.py; kv_blocks: such that one decode node has room for the
    32 streams of both; network: nodes in namespaces, over tcp alone; features: what is off by default is on (canary,
    fetches, tiers on disk and in a store, roles that change); engines: those of others instead of own nodes."""

    home: Path
    model: str = "tiny"
    step_ms: float = 30.0
    token_us: float = 200.0
    kv_blocks: int = 1000
    network: bool = False
    extra: tuple[str, ...] = ()
    features: bool = False
    engines: EngineShape | None = None

    @property
    def seeded(self) -> bool:
        """Whether requests with a seed are among the load."""
        return self.engines is None or self.engines.seeded

    @property
    def prompt_share(self) -> float:
        """Share of the usual length that prompts have."""
        return 1.0 if self.engines is None else self.engines.prompt_share

    @property
    def crowd_share(self) -> float:
        """Share of the planned clients of a crowd that come."""
        return 1.0 if self.engines is None else self.engines.crowd_share

    @property
    def roster(self) -> Roster:
        return Roster(DECODES, ENGINES) if self.engines else Roster()
