"""A decode node of a toy model as a process. SIGUSR1 ends its engine thread, SIGUSR2 its link thread. On stdout: the
status pipe's reports, and `withdrawn` once its lease is. With the argument `hung` the registry takes leases and answers
no withdrawal."""

from __future__ import annotations

import asyncio
import signal
import sys
from unittest.mock import patch

from toy import FINGERPRINT, ToyModel, make_engine

import node.node as node_module
from cluster_state.memory_store import MemoryStore
from decode_worker.service import DecodeService
from node.assembly import Assembled
from node.serve import serve_node
from node.service import Base
from protocol.settings import WorkerSettings


class Store(MemoryStore):
    async def withdraw(self, node_id: str, epoch: int) -> None:
        if "hung" in sys.argv:
            await asyncio.Event().wait()
        await super().withdraw(node_id, epoch)
        print("withdrawn", flush=True)


def breakable(base: Base) -> DecodeService:
    def broken(*_: object) -> None:
        raise RuntimeError("injected")

    def end_engine() -> None:
        base.parts.engine.load = broken  # type: ignore[method-assign, assignment]
        base.engine.submit(lambda engine: None)

    def end_link() -> None:
        base.link._loop._poll = broken  # type: ignore[attr-defined]

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, end_engine)
    loop.add_signal_handler(signal.SIGUSR2, end_link)
    return DecodeService(base)


async def main() -> None:
    engine = make_engine()
    layout = ToyModel.info.layout(ToyModel.dtype, engine.config.block_size)
    parts = Assembled(engine, engine.runner.kv, ToyModel.info, layout, FINGERPRINT, engine.longest)
    with (
        patch.object(node_module, "assemble", lambda settings, progress: parts),
        patch.object(node_module, "RedisStore", lambda url, cluster: Store()),
    ):
        await serve_node(WorkerSettings(role="decode", status_fd=1), breakable)


if __name__ == "__main__":
    asyncio.run(main())
