"""A rank of a node but its first: a process that loads its part of the model and computes what the first one says,
until that one is gone. Arguments: its number, and descriptors of its line, of the ranks' memory and of their pool."""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
import time
from functools import partial

import numpy as np
import torch

from engine.models.decoder import Decoder
from engine.ranks.calls import follow
from engine.ranks.own import Own
from engine.ranks.part import Part
from engine.ranks.shared_group import SharedGroup
from kernels.ops import select
from model_files.refusals import resolve_runnable
from node.model import load
from node.pool_memory import make_pool
from node.rank_memory import RankMemory, shared_pool
from process.lines import Line
from process.log import set_up_log
from protocol.errors import ConfigError
from protocol.layout import KVLayout
from protocol.settings import WorkerSettings

log = logging.getLogger("kvferry.node")

SIGN_S = 0.1
"""Between two signs of life."""
CPU = torch.device("cpu")


def compute(rank: int, line: Line, memory_fd: int, pool_fd: int) -> None:
    """Ends by what is raised where the first rank is gone: OSError or EOFError."""
    settings: WorkerSettings = pickle.loads(line.hear())
    set_up_log(settings.log_level, settings.log_format)
    memory = RankMemory(memory_fd, settings.tensor_parallel_size)
    try:
        group = SharedGroup(rank, memory.places, line.meet)
        decoder = _decoder(settings, Part(group, settings.enable_expert_parallel))
    except ConfigError as error:
        line.say(error.message.encode())
        return
    threading.Thread(target=_live, args=(memory.signs, rank), daemon=True).start()
    line.say(b"")
    layout, blocks = _pool_of(line)
    kv = make_pool(layout, blocks, CPU, partial(shared_pool, pool_fd))
    follow(Own(decoder, group), kv, line.hear)


def _decoder(settings: WorkerSettings, part: Part) -> Decoder:
    source = resolve_runnable(settings.model, settings.load_format)
    decoder = load(settings, source, CPU, select(settings.kernels, CPU), part=part)
    assert isinstance(decoder, Decoder)
    return decoder


def _pool_of(line: Line) -> tuple[KVLayout, int]:
    layout, blocks = pickle.loads(line.hear())
    return layout, blocks


def _live(signs: np.ndarray, rank: int) -> None:
    while True:
        signs[rank] += 1
        time.sleep(SIGN_S)


def main() -> None:
    """It is ended without taking an interpreter with torch apart."""
    rank, descriptor, *shared = map(int, sys.argv[1:])
    status = 0
    try:
        compute(rank, Line(descriptor), *shared)
    except (OSError, EOFError):
        log.debug("the first rank is gone")
    except Exception:
        log.critical("rank %d ends", rank, exc_info=True)
        status = 1
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main()
