"""Ships between two processes over the real UCX."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

from kvferry.kv_transfer.dock import Dock
from kvferry.kv_transfer.receiver import Receiver
from kvferry.kv_transfer.ucx import UcxLink
from kvferry.protocol.messages import DecodeTarget
from tests.kv_transfer.link_processes import child, pattern
from tests.kv_transfer.ship_processes import Memory, prefill_process
from tests.waiting import wait_for

BLOCK = 368_640
BLOCKS = 64


class Decode:
    """Grants every job as many blocks as it has, in order; keeps the events."""

    def __init__(self, blocks: int = BLOCKS):
        self.link = UcxLink("127.0.0.1")
        self.memory = Memory(blocks, BLOCK)
        dock = Dock(self.link, self.memory)
        self.receiver = Receiver(dock, self, 1, "f")
        dock.start()
        self.target = DecodeTarget("d", 1, self.link.address, "f")
        self.events: list[str] = []
        self.jobs: list[object] = []
        self.keys: list[object] = []
        self.blocks = blocks

    def reserve(self, key, job):
        self.jobs.append(job)
        self.keys.append(key)
        self.receiver.granted(key, 0, range(max(self.blocks, len(job.token_ids) // 16)))

    def ready(self, key, commit):
        self.events.append("ready")

    def failed(self, key, error):
        self.events.append("failed")

    def quiet(self, key):
        self.events.append("quiet")


@pytest.fixture
def decode():
    side = Decode()
    yield side
    side.link.stop()


def ask(pipe, *command):
    pipe.send(command)


def event(pipe):
    pipe.send(("next",))
    assert pipe.poll(20)
    return pipe.recv()[0::2]


def started(pipe, tokens=0):
    assert pipe.recv() == "started"
    ask(pipe, "offer", tokens)
    assert event(pipe) == ("granted", 0)


def test_a_ship_in_chunks_arrives_equal_and_is_acknowledged(decode):
    with child(prefill_process, decode.target, BLOCKS, BLOCK, {}) as (_, pipe):
        started(pipe)
        for first in range(0, BLOCKS, 16):
            ask(pipe, "ship", first, first + 16)
        ask(pipe, "commit")
        name, stats = event(pipe)
        assert (name, stats.blocks, stats.bytes) == ("done", BLOCKS, BLOCKS * BLOCK)
        assert event(pipe)[0] == "quiet"
        wait_for(lambda: decode.events == ["ready"])
        for index in range(BLOCKS):
            assert np.array_equal(decode.memory.blocks[index], pattern(index, BLOCK)), index


def test_a_small_ship_passes_a_large_one_on_the_same_connection(decode):
    many = 16 * BLOCKS
    with child(prefill_process, decode.target, BLOCKS, BLOCK, {}) as (_, pipe):
        started(pipe, 16 * many)
        ask(pipe, "ship", 0, many)
        ask(pipe, "commit")
        ask(pipe, "offer", 0)
        assert event(pipe)[0] == "granted"
        ask(pipe, "ship", 0, BLOCKS)
        ask(pipe, "commit")
        ended = [event(pipe) for _ in range(4)]
        assert [stats.blocks for name, stats in ended if name == "done"] == [BLOCKS, many]


def test_a_prompt_of_128k_tokens_fits_the_grant_request(decode):
    with child(prefill_process, decode.target, BLOCKS, BLOCK, {}) as (_, pipe):
        started(pipe, 131_072)
        assert decode.jobs[0].token_ids == tuple(range(131_072))


def test_kill_of_prefill_in_mid_ship_is_quiet_within_two_seconds(decode):
    with child(prefill_process, decode.target, BLOCKS, BLOCK, {}) as (process, pipe):
        started(pipe)
        ask(pipe, "ship", 0, 48)
        wait_for(lambda: decode.memory.blocks[0].any())
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: decode.events == ["failed", "quiet"], 2)
        after = decode.memory.blocks.copy()
        time.sleep(0.2)
        assert np.array_equal(after, decode.memory.blocks)


def test_abort_in_mid_ship_frees_the_grant_and_the_connection_serves_on(decode):
    with child(prefill_process, decode.target, BLOCKS, BLOCK, {}) as (_, pipe):
        started(pipe)
        ask(pipe, "ship", 0, 20)
        ask(pipe, "abort")
        assert [event(pipe)[0], event(pipe)[0]] == ["failed", "quiet"]
        wait_for(lambda: decode.events == ["failed", "quiet"], 3)
        decode.memory.blocks[:] = 0
        ask(pipe, "offer", 0)
        assert event(pipe)[0] == "granted"
        ask(pipe, "ship", 0, BLOCKS)
        ask(pipe, "commit")
        assert event(pipe)[0] == "done"
        wait_for(lambda: decode.events == ["failed", "quiet", "ready"])
        assert np.array_equal(decode.memory.blocks[BLOCKS - 1], pattern(BLOCKS - 1, BLOCK))


def test_cancel_by_decode_in_mid_ship_ends_both_sides(decode):
    from kvferry.protocol.errors import Cancelled

    with child(prefill_process, decode.target, BLOCKS, BLOCK, {}) as (_, pipe):
        started(pipe)
        ask(pipe, "ship", 0, 20)
        decode.receiver.cancel(decode.keys[0], Cancelled("test"))
        name, error = event(pipe)
        assert (name, error) == ("failed", "cancelled: test")
        assert event(pipe)[0] == "quiet"
        wait_for(lambda: decode.events == ["failed", "quiet"], 3)
