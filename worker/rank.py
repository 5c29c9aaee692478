"""Process of a rank other than 0: loads its shard of the model, then computes what rank 0 sends, until rank 0 ends.

Arguments: the rank, then file descriptors of its channel, of the ranks' shared memory and of the blocks' memory. If
each rank has its own pool, a second channel follows, and the rendezvous file unless there are several hosts."""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NoReturn

import numpy as np
import torch

from kvferry.engine.models.decoder import Decoder
from kvferry.engine.ranks.calls import follow
from kvferry.engine.ranks.device_group import DeviceGroup, device_of
from kvferry.engine.ranks.rank_assignment import RankAssignment
from kvferry.engine.ranks.rank_worker import RankWorker
from kvferry.engine.ranks.rendezvous import FileRendezvous, Rendezvous, TcpRendezvous
from kvferry.engine.ranks.shared_group import SharedGroup
from kvferry.kernels.ops import select
from kvferry.model_files.unsupported_models import resolve_runnable
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.layout import KVLayout
from kvferry.protocol.settings import WorkerSettings
from kvferry.runtime.log import set_up_log
from kvferry.runtime.rank_channel import RankChannel
from kvferry.worker import device_rank_pool
from kvferry.worker.block_parts import Segments
from kvferry.worker.hosts import remote_parts
from kvferry.worker.memory_profile import MemoryProfiler, start_profiler
from kvferry.worker.model_loading import load
from kvferry.worker.pool_memory import available_bytes, make_pool
from kvferry.worker.rank_memory import RankMemory, shared_pool
from kvferry.worker.ranks import PROFILED
from kvferry.worker.shared_rows import SharedRows

log = logging.getLogger("kvferry.worker")

HEARTBEAT_S = 0.1
"""Seconds between two heartbeats."""


def compute(
    rank: int,
    line: RankChannel,
    memory_fd: int,
    pool_fd: int,
    moves: RankChannel | None = None,
    rendezvous_fd: int = -1,
) -> None:
    """Load the shard, join the group and compute until rank 0 ends.

    moves: channel for block parts, if each rank has its own pool. rendezvous_fd: rendezvous file, in that case and on
    the host of rank 0 only. Raises OSError or EOFError when rank 0 has ended."""
    settings: WorkerSettings = pickle.loads(line.receive())  # noqa: S301 - from a rank of this node, over its own line
    set_up_log(settings.log_level, settings.log_format)
    ranks = settings.tensor_parallel_size
    device = device_of(rank % settings.ranks_per_host, torch.device(settings.device))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    memory, profiler = RankMemory(memory_fd, ranks), start_profiler(settings, device)
    group = (
        DeviceGroup(rank, ranks, device, _rendezvous(settings, rendezvous_fd))
        if moves is not None
        else SharedGroup(rank, memory.places, line.barrier)
    )
    try:
        decoder = _decoder(settings, device, RankAssignment(group, settings.enable_expert_parallel))
    except ConfigError as error:
        line.send(pickle.dumps((error.message, 0)))
        return
    threading.Thread(target=_live, args=(memory.heartbeats, rank), daemon=True).start()
    line.send(pickle.dumps(("", available_bytes(device))))
    if isinstance(group, DeviceGroup):
        group.connect(bytes(line.receive()))  # once all ranks have loaded
    part = RankWorker(decoder, group)
    if profiler is not None:
        line.send(pickle.dumps(profile(part, line, profiler)))
    layout, blocks = _pool_of(line)
    if moves is None:
        kv = make_pool(layout, blocks, device, partial(shared_pool, pool_fd))
    else:
        kv = make_pool(layout.of_rank(ranks), blocks, device)
        rows = None if settings.node_rank else SharedRows(pool_fd, layout.block_bytes)
        threading.Thread(target=_move, args=(moves, Segments(kv, layout, rank, ranks), rows), daemon=True).start()
    follow(part, kv, line.receive)


def profile(part: RankWorker, line: RankChannel, profiler: MemoryProfiler) -> tuple[str, int]:
    """Run rank 0's largest step on a small pool; return an error or "", and the bytes that remain for the pool."""
    layout, blocks = _pool_of(line)
    kv = make_pool(layout.of_rank(part.group.ranks), blocks, part.decoder.device)

    def receive() -> bytes | bytearray:
        message = line.receive()
        if message == PROFILED:
            raise _Profiled
        return message

    def run() -> None:
        with suppress(_Profiled):
            follow(part, kv, receive)

    try:
        return "", profiler.room(run)
    except ConfigError as error:
        return error.message, 0


class _Profiled(Exception):
    """Rank 0 has run the largest step."""


def _rendezvous(settings: WorkerSettings, rendezvous_fd: int) -> Rendezvous:
    if settings.nnodes > 1:
        return TcpRendezvous(settings.own_address)
    return FileRendezvous(rendezvous_fd)


def _decoder(settings: WorkerSettings, device: torch.device, part: RankAssignment) -> Decoder:
    source = resolve_runnable(settings.model, settings.load_format)
    ops = select(settings.kernels, device, batch_invariant=settings.batch_invariant, graphs=False)
    decoder = load(settings, source, device, ops, part=part)
    assert isinstance(decoder, Decoder)
    return decoder


def _move(line: RankChannel, own: Segments, rows: SharedRows | None) -> None:
    """Move block parts for rank 0's DeviceRankPool. rows: shared rows of rank 0's host; None on another host.

    An error ends the process, because rank 0 would otherwise wait for answers forever."""
    try:
        if rows is None:
            remote_parts.follow(line, own)
        else:
            device_rank_pool.follow(line, own, rows)
    except (OSError, EOFError):
        log.debug("the first rank has exited")
    except BaseException:
        log.critical("parts of blocks can no longer be moved", exc_info=True)
        os._exit(1)


def _pool_of(line: RankChannel) -> tuple[KVLayout, int]:
    layout, blocks = pickle.loads(line.receive())  # noqa: S301 - from a rank of this node, over its own socket
    return layout, blocks


def _live(heartbeats: np.ndarray, rank: int) -> None:
    """Send heartbeats, and end the process when its parent, rank 0, has ended.

    A collective operation on a device would otherwise wait for rank 0 forever."""
    first = os.getppid()
    while os.getppid() == first:
        heartbeats[rank] += 1
        time.sleep(HEARTBEAT_S)
    os._exit(0)


def run(rank: int, work: Callable[[], None]) -> NoReturn:
    """Compute, then exit without finalizing the interpreter and torch."""
    status = 0
    try:
        work()
    except (OSError, EOFError):
        log.debug("the first rank has exited")
    except Exception:
        log.critical("rank %d ends with an error", rank, exc_info=True)
        status = 1
    logging.shutdown()
    os._exit(status)


def main() -> None:
    """Run a rank on the host of rank 0."""
    rank, descriptor, memory_fd, pool_fd, *apart = map(int, sys.argv[1:])
    moves = RankChannel(apart.pop(0)) if apart else None
    run(rank, lambda: compute(rank, RankChannel(descriptor), memory_fd, pool_fd, moves, *apart))


if __name__ == "__main__":
    main()
