"""What tests of embeddings share: jobs that read, and their vectors out of an engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvferry.engine.engine import Engine
from kvferry.engine.events import Generated
from kvferry.protocol.messages import Job
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.protocol.work import Work


def reading(name: str, token_ids: Sequence[int], work: Work) -> Job:
    return Job(name, 0, tuple(token_ids), len(token_ids), work, "router")


def finish(engine: Engine, limit: int = 1000) -> None:
    """Step until nothing is left, and check the books."""
    while engine.has_work():
        assert engine.step(), "the engine is stuck"
        limit -= 1
        assert limit > 0
    engine.check_integrity()


def vectors(engine: Engine) -> dict[str, np.ndarray]:
    """float32 vectors by request id: each came once, without a token."""
    found: dict[str, np.ndarray] = {}
    for event in engine.events:
        if isinstance(event, Generated) and event.delta.vector is not None:
            assert (event.delta.token_ids, event.delta.finish_reason, event.delta.index) == ((), "stop", 0)
            assert event.key[0] not in found
            found[event.key[0]] = np.frombuffer(event.delta.vector, "<f4")
    return found


def accounts(engine: Engine) -> dict[str, Reuse]:
    """The first account of each request."""
    events = [e for e in engine.events if isinstance(e, Generated) and e.delta.reuse is not None]
    return {event.key[0]: event.delta.reuse for event in events if event.delta.reuse is not None}
