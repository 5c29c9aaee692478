"""What strangers send to a link's port over the real UCX: they lose their connection, and nobody else notices."""

from __future__ import annotations

import numpy as np
import pytest
from link_processes import child, pattern
from raw_client import strange_process
from ship_processes import prefill_process
from test_ship_ucx import BLOCK, BLOCKS, Decode, ask, event, started
from waiting import wait_for

from kv_transfer.ucx_frames import HEADER, MESSAGE
from protocol.link_messages import Grant
from protocol.wire import pack


@pytest.fixture
def decode():
    side = Decode()
    yield side
    side.link.stop()


def strangers(pipe, *command):
    pipe.send(command)
    assert pipe.poll(30), command
    assert pipe.recv() == "done"


def ship(decode, pipe):
    """One whole ship."""
    decode.events.clear()
    ask(pipe, "offer", 0)
    assert event(pipe)[0] == "granted"
    ask(pipe, "ship", 0, BLOCKS)
    ask(pipe, "commit")
    assert event(pipe)[0] == "done"
    assert event(pipe)[0] == "quiet"
    assert decode.events == ["ready"]


@pytest.mark.parametrize("size", [0, 1, 7, 9, 1 << 20])
def test_an_active_message_that_is_no_greeting_loses_its_connection_alone(decode, size):
    with child(strange_process, decode.link.address, 1) as (_, pipe):
        assert pipe.recv() == "started"
        strangers(pipe, "active", b"\1" * size)
    with child(prefill_process, decode.target, BLOCKS, BLOCK, {}) as (_, pipe):
        assert pipe.recv() == "started"
        ship(decode, pipe)


def test_frames_that_are_no_message_lose_their_connection_alone(decode, caplog):
    frames = [
        HEADER.pack(MESSAGE, 1, 0, len(pack(message))) + pack(message) for message in (Grant(1, 0, 1 << 40, 1), 5)
    ]
    frames.append(HEADER.pack(MESSAGE, 1, 0, 1 << 31))
    with child(prefill_process, decode.target, BLOCKS, BLOCK, {}) as (_, pipe):
        started(pipe)
        with child(strange_process, decode.link.address, 1) as (_, stranger):
            assert stranger.recv() == "started"
            for count, frame in enumerate(frames, 1):
                strangers(stranger, "frames", [frame])
                wait_for(lambda count=count: caplog.text.count("is dropped: ") == count)
        ask(pipe, "ship", 0, BLOCKS)
        ask(pipe, "commit")
        assert event(pipe)[0] == "done"


def test_hundreds_of_random_messages_disturb_no_ship(decode, caplog):
    with child(prefill_process, decode.target, BLOCKS, BLOCK, {}) as (_, pipe):
        assert pipe.recv() == "started"
        with child(strange_process, decode.link.address, 7) as (_, stranger):
            assert stranger.recv() == "started"
            for _ in range(15):
                stranger.send(("fuzz", 30))
                ship(decode, pipe)
                assert stranger.poll(30)
                assert stranger.recv() == "done"
            for index in range(BLOCKS):
                assert np.array_equal(decode.memory.blocks[index], pattern(index, BLOCK)), index
        ship(decode, pipe)
    assert not [record for record in caplog.records if record.exc_info], "a stranger's bytes raised where none may"
