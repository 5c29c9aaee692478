"""The process-wide things that a world replaces while it runs: the clock, the chances, the log."""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from kvferry.cluster_state.index_writer import IndexWriter
from kvferry.engine import replication
from kvferry.kv_transfer.receiver import Receiver
from kvferry.placement import fetching
from kvferry.placement.types import Demand, Placement
from kvferry.router.dispatch.context import Hits
from kvferry.router.dispatch.model_cluster import ModelCluster
from kvferry.router.nodes.model_nodes import FingerprintGroup
from kvferry.runtime.suspend_aware_clock import TICK_S, SuspendAwareClock
from tests.virtual.nodes import METRICS

LOSS_S = 0.2
"""By which a fetch may be slower than computing what it brings: blocks are few, and fetched all the same."""
_place = ModelCluster.place


def _away(
    cluster: ModelCluster, demand: Demand, held: Hits, groups: Sequence[FingerprintGroup] | None = None
) -> Placement:
    """Not where the prefix is, as if that node were busy: it is fetched from there."""
    every = {name: blocks for found in held.values() for name, blocks in found.items()}
    most = max(every, key=every.__getitem__, default="")
    penalties = {entry.key: LOSS_S for entry in cluster.model.members if entry.key[0] == most}
    return _place(cluster, replace(demand, penalties={**demand.penalties, **penalties}), held, groups)


class _Errors(logging.Handler):
    """What is logged as an error is one."""

    def __init__(self, world: Any) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        raised = record.exc_info[1] if record.exc_info else ""
        self._world.blame(f"logged: {record.getMessage()} {raised!r}")


@contextlib.contextmanager
def virtual(world: Any) -> Iterator[None]:
    """The clock and the chances of everything are the world's."""
    clock = world.loop.time
    requested = Receiver._requested

    def watched(receiver: Receiver, peer: Any, request: Any) -> None:
        requested(receiver, peer, request)
        if receiver.transfers.find((peer, request.transfer)) and request.epoch != receiver._epoch:
            world.blame(f"{peer}: transfer {request.transfer} is granted by another epoch")

    handler, root = _Errors(world), logging.getLogger()
    names = iter(range(1 << 30))
    before = _counted()
    state = random.getstate()
    random.seed(world.plan.seed)
    root.addHandler(handler)
    try:
        with (
            patch.object(time, "monotonic", clock),
            patch.object(Receiver, "_requested", watched),
            patch.object(time, "time_ns", lambda: int(1e9 * (1 + clock()))),
            patch.object(SuspendAwareClock.__init__, "__defaults__", (TICK_S, clock)),
            patch.object(
                IndexWriter.__init__, "__kwdefaults__", {**IndexWriter.__init__.__kwdefaults__, "flush_s": 0.5}
            ),
            patch.object(replication, "MIN_BLOCKS", 1),
            patch.object(fetching, "MIN_GAIN_S", -LOSS_S),
            patch.object(ModelCluster, "place", ModelCluster.place if world.plan.seed % 2 else _away),
            patch.object(secrets, "token_hex", lambda count: f"{next(names):x}"),
        ):
            yield
    finally:
        root.removeHandler(handler)
        random.setstate(state)
    counted = {name: count - before[name] for name, count in _counted().items()}
    if counted["violations"]:
        world.blame("accounts do not add up")
    if counted["corrupt"] and not world.corrupted:
        world.blame(f"{counted['corrupt']:g} transfers were corrupt")
    if counted["failed"] and world.calm:
        world.blame(f"{counted['failed']:g} ships failed where nothing was wrong")


def _counted() -> dict[str, float]:
    """What must not happen, or only for a reason, as nodes count it."""
    violations = sum(metrics.account_violations._value.get() for metrics in METRICS.values())
    ships = {why: sum(each.ships[why]._value.get() for each in METRICS.values()) for why in ("corrupt", "failed")}
    return {"violations": violations, **ships}
