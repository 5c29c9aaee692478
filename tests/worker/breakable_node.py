"""A decode node of a toy model as a process, of which SIGUSR1 breaks a part. Arguments: what breaks and how (`FAULTS`),
and whether the registry `answers` or is `hung`: then it takes leases and answers no withdrawal. On stdout: the status
pipe's reports, and `withdrawn` once its lease is."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable
from typing import cast
from unittest.mock import patch

import kvferry.worker.node as node_module
from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.decode_worker.service import DecodeService
from kvferry.engine import audit_schedule
from kvferry.engine.runner import Runner
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker import watchdog
from kvferry.worker.engine_parts import EngineParts
from kvferry.worker.serve import serve_node
from kvferry.worker.service import NodeParts
from tests.toy import FINGERPRINT, ToyModel, make_engine


class Store(MemoryStore):
    async def withdraw(self, node_id: str, epoch: int) -> None:
        if "hung" in sys.argv:
            await asyncio.Event().wait()
        await super().withdraw(node_id, epoch)
        print("withdrawn", flush=True)


def breakable(base: NodeParts) -> DecodeService:
    def broken(*_: object) -> None:
        raise RuntimeError("injected")

    def unbalanced() -> None:
        raise AssertionError("injected")

    def hang(*_: object) -> None:
        threading.Event().wait()

    def end_engine() -> None:
        base.parts.engine.load = broken  # type: ignore[method-assign, assignment]
        base.engine.submit(lambda engine: None)

    def end_link() -> None:
        base.dock.link._loop._progress = broken  # type: ignore[attr-defined]

    def unbalance() -> None:
        base.engine._self_check.turn = unbalanced  # type: ignore[method-assign]
        base.engine._self_check.changed()
        base.engine.submit(lambda engine: None)

    faults: dict[str, Callable[[], None]] = {
        "engine ended": end_engine,
        "link ended": end_link,
        "engine hung": lambda: base.engine.submit(hang),
        "link hung": lambda: base.dock.link.submit(hang),
        "loop hung": hang,
        "all hung": lambda: (base.engine.submit(hang), base.dock.link.submit(hang), hang())[-1],
        "books wrong": unbalance,
    }
    base.app.get("/epoch")(lambda: base.epoch)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, faults[sys.argv[1]])
    return DecodeService(base)


async def main() -> None:
    watchdog.ENGINE_S = watchdog.LOOP_S = watchdog.LINK_S = 1.5
    audit_schedule.EVERY_S = 0.1
    engine = make_engine()
    layout = ToyModel.info.layout(ToyModel.dtype, engine.config.block_size)
    parts = EngineParts(engine, cast(Runner, engine.runner).kv, ToyModel.info, layout, FINGERPRINT, engine.longest)
    store = Store()
    with (
        patch.object(node_module, "assemble", lambda settings, progress: parts),
        patch.object(node_module, "RedisStore", lambda url, cluster, **options: store),
    ):
        await serve_node(WorkerSettings(role="decode", status_fd=1, respawned=True), breakable)


if __name__ == "__main__":
    asyncio.run(main())
