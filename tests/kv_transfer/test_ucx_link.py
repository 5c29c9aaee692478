"""The UCX link between real processes: blocks, control messages, death and freezing of the peer, idling."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time

import numpy as np
import pytest

from kvferry.kv_transfer.ucx import UcxLink
from kvferry.protocol.errors import ConfigError, NodeLost
from kvferry.runtime.address import knows_ipv6, parse_host_port
from tests.kv_transfer.link_processes import Recorder, child, listen, no_thread_left, pattern, send_blocks
from tests.waiting import wait_for

BLOCK = 368_640


@pytest.fixture
def links():
    """Make started links; all are stopped at the end."""
    made: list[UcxLink] = []

    def make(handler, **options) -> UcxLink:
        made.append(UcxLink(**{"host": "127.0.0.1"} | options))
        made[-1].start(handler)
        return made[-1]

    with no_thread_left():
        yield make
        for link in made:
            link.stop()


def receive(link, peer, blocks, done, first=0):
    for i, block in enumerate(blocks, first):
        link.submit(lambda i=i, block=block: link.receive_block(peer, 1 << 40 | i, block, done.append))


def test_200_blocks_of_360_kib_arrive_bitwise_equal(links):
    recorder, done = Recorder(), []
    link = links(recorder)
    with child(send_blocks, link.address, 200, BLOCK, {}) as (_, pipe):
        assert pipe.recv() == "ready"
        pipe.send(("message", b"hello"))
        wait_for(lambda: recorder.messages)
        blocks = np.zeros((200, BLOCK), dtype=np.uint8)
        receive(link, recorder.messages[0][0], blocks, done)
        pipe.send(("send", 0, 200))
        pipe.send(("wait", 200))
        assert pipe.recv() == []
        wait_for(lambda: len(done) == 200)
        assert done == [None] * 200
        for i in range(200):
            assert np.array_equal(blocks[i], pattern(i, BLOCK)), i
        pipe.send(("stop",))
        wait_for(lambda: recorder.lost, 2)


@pytest.mark.skipif(not knows_ipv6(), reason="this machine knows no IPv6")
@pytest.mark.parametrize("transports", ["", "tcp,self"], ids=["shared memory", "tcp"])
def test_blocks_travel_where_there_is_ipv6_alone(links, transports):
    recorder, done, options = Recorder(), [], {"host": "::1", "transports": transports}
    link = links(recorder, **options)
    assert link.address.startswith("[::1]:")
    with child(send_blocks, link.address, 20, BLOCK, options) as (_, pipe):
        assert pipe.recv() == "ready"
        pipe.send(("message", b"hello"))
        wait_for(lambda: recorder.messages)
        blocks = np.zeros((20, BLOCK), dtype=np.uint8)
        receive(link, recorder.messages[0][0], blocks, done)
        pipe.send(("send", 0, 20))
        wait_for(lambda: len(done) == 20)
        assert done == [None] * 20
        assert all(np.array_equal(blocks[i], pattern(i, BLOCK)) for i in range(20))
        pipe.send(("stop",))
        wait_for(lambda: recorder.lost, 2)


def test_control_messages_of_any_size_keep_their_order(links):
    sizes = [0, 1, 7_999, 8_000, 8_001, 700_000, 3, 4 << 20, 12]
    left, right = Recorder(), Recorder()
    a, b = links(left), links(right)
    messages = [bytes([i]) * size for i, size in enumerate(sizes)]

    def go():
        peer = a.connect(b.address)
        for data in messages:
            a.send(peer, data)

    right.on_message = lambda peer, data: b.send(peer, data)
    a.submit(go)
    wait_for(lambda: len(left.messages) == len(messages))
    assert [data for _, data in right.messages] == messages
    assert [data for _, data in left.messages] == messages


def test_sigkill_of_the_sender_fails_all_receives_and_goes_quiet(links):
    recorder, done, quiet = Recorder(), [], []
    link = links(recorder)
    with child(send_blocks, link.address, 64, BLOCK, {}) as (process, pipe):
        assert pipe.recv() == "ready"
        pipe.send(("message", b"hello"))
        wait_for(lambda: recorder.messages)
        peer = recorder.messages[0][0]
        blocks = np.zeros((150, BLOCK), dtype=np.uint8)
        receive(link, peer, blocks, done)
        pipe.send(("send", 0, 40))
        wait_for(lambda: done)
        os.kill(process.pid, signal.SIGKILL)
        killed = time.monotonic()
        wait_for(lambda: recorder.lost, 2)
        link.submit(lambda: link.disconnect(peer, lambda: quiet.append(blocks.copy())))
        wait_for(lambda: quiet, 2)
        assert time.monotonic() - killed < 2
        assert len(done) == 150
        assert sum(error is None for error in done) <= 40
        time.sleep(0.2)
        assert np.array_equal(quiet[0], blocks)
        assert len(recorder.lost) == 1


def test_a_frozen_peer_is_noticed_by_its_silence(links):
    recorder = Recorder()
    options = {"ping_interval": 0.1, "silence_limit": 0.8}
    link = links(recorder, **options)
    with child(send_blocks, link.address, 1, BLOCK, options) as (process, pipe):
        assert pipe.recv() == "ready"
        pipe.send(("message", b"hello"))
        wait_for(lambda: recorder.messages)
        time.sleep(1.2)
        assert not recorder.lost
        os.kill(process.pid, signal.SIGSTOP)
        try:
            wait_for(lambda: recorder.lost, 4)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert isinstance(recorder.lost[0][1], NodeLost)
        assert "silent" in str(recorder.lost[0][1])


def test_an_address_nobody_listens_on_is_a_lost_peer_and_fails_its_operations(links):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    recorder, done = Recorder(), []
    link = links(recorder)

    def go():
        peer = link.connect(address)
        link.send(peer, b"anyone?")
        link.send_block(peer, 1 << 40, np.zeros(8, dtype=np.uint8), done.append)

    link.submit(go)
    wait_for(lambda: recorder.lost, 5)
    assert address in str(recorder.lost[0][1])
    assert len(done) == 1
    assert isinstance(done[0], NodeLost)


def test_disconnect_completes_receives_with_an_error_then_is_quiet_and_tells_the_other_side(links):
    left, right, order = Recorder(), Recorder(), []
    a, b = links(left), links(right)
    a.submit(lambda: a.send(a.connect(b.address), b"hi"))
    wait_for(lambda: right.messages)
    peer = right.messages[0][0]
    buffer = np.zeros(BLOCK, dtype=np.uint8)
    b.submit(lambda: b.receive_block(peer, 1 << 40, buffer, lambda error: order.append(type(error).__name__)))
    b.submit(lambda: b.disconnect(peer, lambda: order.append("quiet")))
    wait_for(lambda: len(order) == 2)
    assert order == ["NodeLost", "quiet"]
    assert not right.lost
    wait_for(lambda: left.lost, 2)


def test_buffers_that_ucx_would_treat_wrongly_are_refused(links):
    left, right, refused = Recorder(), Recorder(), []
    a, b = links(left), links(right)
    a.submit(lambda: a.send(a.connect(b.address), b"hi"))
    wait_for(lambda: right.messages)
    peer = right.messages[0][0]
    wrong = [
        (b.send_block, np.zeros((8, 8), dtype=np.uint8)[:, 1]),
        (b.receive_block, np.zeros((8, 8), dtype=np.uint8)[:, 1]),
        (b.receive_block, b"read only"),
    ]

    def go():
        for post, buffer in wrong:
            try:
                post(peer, 1 << 40, buffer, lambda error: None)
            except ValueError as error:
                refused.append(str(error))

    b.submit(go)
    wait_for(lambda: len(refused) == 3)


def test_eight_peers_connect_at_once_and_each_keeps_its_own_channel(links):
    server = Recorder()
    link = links(server)
    server.on_message = link.send
    recorders = [Recorder() for _ in range(8)]
    for i, recorder in enumerate(recorders):
        client = links(recorder)
        client.submit(lambda client=client, i=i: client.send(client.connect(link.address), b"%d" % i))
    wait_for(lambda: all(r.messages for r in recorders), 20)
    assert [r.messages[0][1] for r in recorders] == [b"%d" % i for i in range(8)]


def test_an_idle_link_uses_less_than_3_percent_of_a_core(links):
    left, right = Recorder(), Recorder()
    a, b = links(left), links(right)
    a.submit(lambda: a.send(a.connect(b.address), b"hi"))
    wait_for(lambda: right.messages)
    time.sleep(0.3)
    cpu, wall = time.process_time(), time.monotonic()
    time.sleep(2.0)
    share = (time.process_time() - cpu) / (time.monotonic() - wall)
    assert share / 2 < 0.03, share
    assert not left.lost
    assert not right.lost


def test_a_taken_port_is_a_config_error_with_a_remedy(links):
    link = links(Recorder())
    _, port = parse_host_port(link.address)
    with pytest.raises(ConfigError, match="--link-port"):
        UcxLink("127.0.0.1", port).start(Recorder())


def test_transports_without_tcp_are_refused():
    with pytest.raises(ConfigError, match="must contain tcp"):
        UcxLink("127.0.0.1", transports="posix,self")


def test_stopped_links_give_their_descriptors_back():
    """Ten per pair stayed open while closing an endpoint was not followed by progress."""

    def pair():
        left, right = Recorder(), Recorder()
        a, b = UcxLink("127.0.0.1"), UcxLink("127.0.0.1")
        a.start(left)
        b.start(right)
        a.submit(lambda: a.send(a.connect(b.address), b"hi"))
        wait_for(lambda: right.messages)
        a.stop()
        b.stop()

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    pair()
    before = descriptors()
    for _ in range(5):
        pair()
    assert descriptors() - before < 30


def test_a_link_thread_that_ends_by_an_exception_says_so_once(links, caplog):
    faults = []
    link = links(Recorder(), on_fault=lambda fault: faults.append((fault, threading.current_thread().name)))
    assert link.fault is None

    def broken():
        raise RuntimeError("broken round")

    link._loop._progress = broken
    link.submit(lambda: None)
    wait_for(lambda: faults, 5)
    assert faults == [("RuntimeError: broken round", "kv-link")]
    assert link.fault == "RuntimeError: broken round"
    assert "the link thread ends" in caplog.text


def test_the_heartbeat_goes_on_when_idle_and_stands_still_in_a_hang(links):
    link, held = links(Recorder(), ping_interval=0.1), threading.Event()
    before = link.heartbeat
    wait_for(lambda: link.heartbeat > before + 0.2, 5)
    entered = threading.Event()
    link.submit(lambda: (entered.set(), held.wait(10)))
    assert entered.wait(5)
    stuck = link.heartbeat
    assert not held.wait(0.3)
    assert link.heartbeat == stuck
    held.set()
    wait_for(lambda: link.heartbeat > stuck, 5)


def test_each_command_of_a_long_round_is_a_move(links):
    """A hundred grants and aborts at once are no hang."""
    link, beats = links(Recorder()), []
    for _ in range(5):
        link.submit(lambda: (beats.append(link.heartbeat), time.sleep(0.05)))
    wait_for(lambda: len(beats) == 5, 5)
    assert len(set(beats)) == 5


def test_a_port_can_be_bound_again_at_once_after_a_kill():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for _ in range(3):
        with child(listen, port) as (process, pipe):
            assert pipe.poll(30)
            assert pipe.recv() == "listening"
            recorder, client = Recorder(), UcxLink("127.0.0.1")
            client.start(recorder)
            client.submit(lambda client=client: client.send(client.connect(f"127.0.0.1:{port}"), b"hi"))
            assert pipe.poll(10)
            assert pipe.recv() == b"hi"
            os.kill(process.pid, signal.SIGKILL)
            process.join(10)
            wait_for(lambda recorder=recorder: recorder.lost, 5)
            client.stop()
