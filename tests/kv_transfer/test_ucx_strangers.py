"""What strangers send to a link's port, and members that break the rules: they lose their connection, nobody else
notices."""

from __future__ import annotations

import os
import random
import time

import numpy as np
import pytest

from kvferry.kv_transfer import ucx_handshakes
from kvferry.kv_transfer.control_stream import ALIVE, CHALLENGE, HEADER, HELLO, MESSAGE, REFUSED, WELCOME
from kvferry.kv_transfer.handshake import HandshakeTerms
from kvferry.kv_transfer.ucx import UcxLink
from kvferry.protocol.link_messages import Abort, Commit, Grant, GrantRequest
from kvferry.protocol.messages import TokenDelta
from kvferry.protocol.wire import pack
from tests.kv_transfer.link_processes import Recorder, child, pattern
from tests.kv_transfer.raw_client import Stranger, frame
from tests.kv_transfer.ship_processes import prefill_process
from tests.kv_transfer.test_ship_ucx import BLOCK, BLOCKS, Decode, ask, event, started
from tests.waiting import wait_for

DELTA = TokenDelta("r", 1, 0, (1,))
WRONG = (
    5,
    [1, {"a": None}],
    "text",
    Grant(1, 0, 1 << 40, 0),
    Grant(1, 0, 1 << 40, 1),
    Grant(-1, 0, 1, 1 << 30),
    Abort([1], b"x"),  # type: ignore[arg-type]
    Abort({}, 5),  # type: ignore[arg-type]
    Commit(1, 2, ("x", 1 << 70 - 8), DELTA),  # type: ignore[arg-type]
    Commit(1, -3, (), None),  # type: ignore[arg-type]
    GrantRequest(1, 1, "f", "no job"),  # type: ignore[arg-type]
    GrantRequest(1, 1, "f", DELTA),  # type: ignore[arg-type]
)
"""Messages that the codec takes and no field of which can be trusted."""


@pytest.fixture
def decode():
    side = Decode()
    yield side
    side.link.stop()


@pytest.fixture
def linked():
    """A link that hangs up on guests after a second."""
    link = UcxLink("127.0.0.1", connect_timeout=1.0)
    recorder = Recorder()
    link.start(recorder)
    yield link, recorder
    assert link.fault is None
    link.stop()


def ship(decode, pipe):
    """One whole ship."""
    decode.events.clear()
    ask(pipe, "offer", 0)
    assert event(pipe)[0] == "granted"
    ask(pipe, "ship", 0, BLOCKS)
    ask(pipe, "commit")
    assert event(pipe)[0] == "done"
    assert event(pipe)[0] == "quiet"
    wait_for(lambda: decode.events == ["ready"])


def serves(link, recorder):
    """Another link is served within a second or two."""
    client = UcxLink("127.0.0.1")
    client.start(Recorder())
    before = len(recorder.messages)
    client.submit(lambda: client.send(client.connect(link.address), b"hi"))
    wait_for(lambda: len(recorder.messages) > before, 5)
    client.stop()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
        frame(HELLO, b""),
        frame(HELLO, b"\1"),
        frame(HELLO, b"\1" * 200),
        frame(WELCOME, b"\1" * 200),
        frame(REFUSED, b"n"),
        frame(CHALLENGE, b"\1" * 41),
        frame(MESSAGE, b"hi"),
        frame(ALIVE, b""),
        frame(255, b""),
        HEADER.pack(HELLO, 1 << 31),
        HEADER.pack(MESSAGE, 4 << 20),
    ],
)
def test_what_is_no_greeting_ends_its_connection_at_once(linked, data):
    stranger = Stranger(linked[0].address)
    stranger.raw(data)
    assert stranger.ended(0.7)
    serves(*linked)
    assert len(linked[1].messages) == 1


def test_who_does_not_greet_is_hung_up_on(linked):
    silent, halfway = Stranger(linked[0].address), Stranger(linked[0].address)
    halfway.raw(HEADER.pack(HELLO, 100))
    assert not silent.ended(0.5)
    assert silent.ended(2)
    assert halfway.ended(2)


def test_many_who_do_not_greet_cost_few_descriptors_and_keep_nobody_out(linked, monkeypatch):
    monkeypatch.setattr(ucx_handshakes, "MAX_PENDING", 8)
    before = len(os.listdir("/proc/self/fd"))
    strangers = [Stranger(linked[0].address) for _ in range(50)]
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before + 50 + 8, 5)
    serves(*linked)
    for stranger in strangers:
        stranger.close()


def test_a_frame_that_was_repeated_changed_or_not_sealed_ends_the_connection(linked):
    for attack in (
        lambda sealed: sealed * 2,
        lambda sealed: sealed[:-1] + bytes([sealed[-1] ^ 1]),
        lambda sealed: frame(MESSAGE, b"x" * 40),
    ):
        stranger = Stranger(linked[0].address)
        answer = stranger.greet()
        assert answer is not None
        assert answer[0] == WELCOME
        header = HEADER.pack(MESSAGE, 2)
        stranger.raw(attack(header + b"hi" + stranger.stream._outward.next(header, b"hi")))
        assert stranger.ended(1)
    assert [data for _, data in linked[1].messages] == [b"hi"]
    serves(*linked)


def test_messages_that_break_the_rules_lose_their_connection_alone(decode):
    with child(prefill_process, decode.target, BLOCKS, BLOCK, {}) as (_, pipe):
        started(pipe)
        for wrong in WRONG:
            member = Stranger(decode.link.address)
            assert (member.greet() or (0,))[0] == WELCOME
            member.stream.send(MESSAGE, pack(wrong))
            assert member.ended(2), wrong
        ask(pipe, "ship", 0, BLOCKS)
        ask(pipe, "commit")
        assert event(pipe)[0] == "done"


def test_hundreds_of_random_messages_disturb_no_ship(decode, caplog):
    draw = random.Random(7)
    with child(prefill_process, decode.target, BLOCKS, BLOCK, {}) as (_, pipe):
        assert pipe.recv() == "started"
        for _ in range(8):
            strangers = [strange(decode.link.address, draw) for _ in range(20)]
            ship(decode, pipe)
            for index in range(BLOCKS):
                assert np.array_equal(decode.memory.blocks[index], pattern(index, BLOCK)), index
            for stranger in strangers:
                stranger.close()
        ship(decode, pipe)
    assert not [record for record in caplog.records if record.exc_info], "a stranger's bytes raised where none may"


def strange(address: str, draw: random.Random) -> Stranger:
    """A connection that sent something at random: before its greeting, in it, or after it."""
    stranger = Stranger(address)
    data = draw.randbytes(draw.choice((0, 1, 7, 9, 10, 11, 100, 5000, 20_000)))
    match draw.randrange(4):
        case 0:
            stranger.raw(data)
        case 1:
            stranger.raw(
                HEADER.pack(draw.choice((0, 1, 1, 2, 3, 4, 5, 6)), draw.choice((len(data), 1 << 31, 0))) + data
            )
        case 2:
            hello = bytearray(stranger.hello(b"address"))
            for _ in range(draw.randrange(1, 4)):
                hello[draw.randrange(len(hello))] ^= 1 << draw.randrange(8)
            stranger.raw(frame(HELLO, bytes(hello)))
        case _:
            stranger.greet()
            stranger.raw(data)
    return stranger


def test_a_broken_handler_of_one_peers_block_costs_that_peer_alone(linked, monkeypatch):
    link, recorder = linked
    clients = [UcxLink("127.0.0.1") for _ in range(2)]
    for client in clients:
        client.start(Recorder())
        client.submit(lambda client=client: client.send(client.connect(link.address), b"hi"))
        wait_for(lambda client=client: len(recorder.messages) == clients.index(client) + 1)
    first, second = (peer for peer, _ in recorder.messages)

    def reap():
        raise RuntimeError("injected")

    link.submit(lambda: monkeypatch.setattr(link._connections.find(first).blocks, "reap", reap))
    buffer, done = np.zeros(8, dtype=np.uint8), []
    link.submit(lambda: link.receive_block(first, 1 << 40, buffer, done.append))
    wait_for(lambda: recorder.lost, 5)
    assert [peer for peer, _ in recorder.lost] == [first]
    assert len(done) == 1
    before = len(recorder.messages)

    def speak() -> None:
        for peer in clients[1]._connections._peers:
            clients[1].send(peer, b"still here")

    clients[1].submit(speak)
    wait_for(lambda: len(recorder.messages) > before, 5)
    assert recorder.messages[-1] == (second, b"still here")
    for client in clients:
        client.stop()


def test_strangers_without_the_secret_are_told_so_and_logged_seldom(caplog):
    link = UcxLink("127.0.0.1", terms=HandshakeTerms(lambda: (b"s" * 32,)))
    link.start(Recorder())
    for secret in (b"", b"t" * 32, b"s" * 31):
        answer = Stranger(link.address, HandshakeTerms(lambda secret=secret: (secret,))).greet()
        assert answer is not None
        assert answer[0] == REFUSED
        assert b"do not share a cluster secret" in answer[1]
    time.sleep(0.1)
    assert caplog.text.count("rejecting the connection of ") == 1
    link.stop()


def test_a_greeting_that_was_overheard_is_of_no_use_later(linked):
    hello = Stranger(linked[0].address).hello()
    late = Stranger(linked[0].address)
    late.read_challenge()
    late.raw(frame(HELLO, hello))
    answer = late.next()
    assert answer is not None
    assert answer[0] == REFUSED
