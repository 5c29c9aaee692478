"""The receiver against a real sender on loopback, and over links that break."""

from __future__ import annotations

import dataclasses

import pytest

from kvferry.engine.block_interfaces import QUIESCE
from kvferry.protocol import errors
from kvferry.protocol.link_messages import Commit, CommitAck, Grant, GrantRequest
from kvferry.protocol.wire import pack, unpack
from tests.kv_transfer.fault_injection import LATE_BYTE, Faults
from tests.kv_transfer.loopback import LoopbackNetwork
from tests.kv_transfer.ship_kit import DecodeSide, PrefillSide, delta
from tests.ledger_books import blocks


def sides(faults: Faults | None = None, prefill_faults: Faults | None = None, **options):
    network = LoopbackNetwork()
    return network, PrefillSide(network, "p:1", prefill_faults), DecodeSide(network, "d:1", faults, **options)


def shipped(network, prefill, decode, blocks=3):
    """Offer and post everything, without the commit."""
    t = prefill.offer(decode.target, blocks)
    network.run()
    prefill.ship(t, 0, blocks)
    network.run()
    return t, next(iter(decode.log))


def test_receives_are_posted_before_the_grant_goes_out():
    network, prefill, decode = sides()
    posted_at_grant = []
    send, receive, posted = decode.inner.send, decode.inner.receive_block, []
    decode.inner.receive_block = lambda *args: (posted.append(1), receive(*args))
    decode.inner.send = lambda peer, data: (
        posted_at_grant.append(len(posted)) if isinstance(unpack(data), Grant) else None,
        send(peer, data),
    )
    prefill.offer(decode.target, 5)
    network.run()
    assert posted_at_grant == [5]


@pytest.mark.parametrize("by", ["decode", "prefill", "death"])
def test_receives_are_posted_in_slices_and_one_given_up_between_them_ends_alone(by, monkeypatch):
    monkeypatch.setattr("kvferry.kv_transfer.receiver.POSTED_AT_ONCE", 2)
    network, prefill, decode = sides()
    t, other = prefill.offer(decode.target, 9), prefill.offer(decode.target, 1)
    while len(decode.watched.posted) < 2:
        network.step()
    key = next(iter(decode.log))
    assert len(decode.watched.posted) == 2
    if by == "decode":
        decode.receiver.cancel(key, errors.Cancelled("the client disconnected"))
    elif by == "prefill":
        prefill.sender.abort(t, "the client disconnected")
    else:
        prefill.inner.kill()
    network.run()
    assert decode.log[key] == ["reserve", "failed", "quiet"]
    if by != "death":
        assert prefill.log[t][-2:] == ["failed", "quiet"]
        assert prefill.log[other] == ["granted"]
        prefill.sender.abort(other, "over")
        network.run()
    assert decode.pool.ledger.num_held == 0
    decode.pool.check()


def test_a_corrupted_block_fails_on_both_sides():
    network, prefill, decode = sides(Faults(corrupt=lambda tag: tag & 0xFFFF == 1))
    t, key = shipped(network, prefill, decode)
    prefill.sender.commit(t, delta())
    network.run()
    assert decode.log[key] == ["reserve", "failed", "quiet"]
    assert "prompt block 1" in str(decode.errors[key])
    assert prefill.log[t] == ["granted", "failed", "quiet"]
    assert isinstance(prefill.errors[t], errors.TransferFailed)
    decode.pool.check()


def test_unverified_blocks_are_not_compared():
    network, prefill, decode = sides(Faults(corrupt=lambda tag: tag & 0xFFFF == 1), verify=0.0)
    decode.ready = lambda key, commit: decode.log[key].append("ready")
    t, key = shipped(network, prefill, decode)
    prefill.sender.commit(t, delta())
    network.run()
    assert decode.log[key] == ["reserve", "ready"]


def test_refused_when_the_pool_is_full():
    network, prefill, decode = sides()
    t = prefill.offer(decode.target, 49)
    network.run()
    assert prefill.log[t] == ["failed", "quiet"]
    assert isinstance(prefill.errors[t], errors.GrantRefused)
    assert decode.pool.ledger.num_held == 0


@pytest.mark.parametrize("posted", [0, 2, 3])
def test_cancel_tells_the_sender_who_completes_the_rest(posted):
    network, prefill, decode = sides()
    t = prefill.offer(decode.target, 3)
    network.run()
    prefill.ship(t, 0, posted)
    key = next(iter(decode.log))
    decode.receiver.cancel(key, errors.Cancelled("the client disconnected"))
    network.run()
    assert decode.log[key] == ["reserve", "failed", "quiet"]
    assert isinstance(prefill.errors[t], errors.Cancelled)
    assert prefill.log[t] == ["granted", "failed", "quiet"]
    decode.pool.check()
    prefill.pool.check()


def test_blocks_of_a_failed_grant_stay_held_until_the_late_writes_are_over():
    network, prefill, decode = sides(Faults())
    prefill.offer(decode.target, 3)
    network.run()
    key = next(iter(decode.log))
    ids = decode.granted_ids[key]
    prefill.inner.kill()
    written = []
    give = decode.pool.give
    decode.pool.give = lambda owner, reason: (
        written.append((decode.pool.memory[ids] == LATE_BYTE).all()),
        give(owner, reason),
    )
    while "failed" not in decode.log[key]:
        network.step()
    assert blocks(decode.pool.ledger, key, QUIESCE) == ids
    network.run()
    assert decode.log[key] == ["reserve", "failed", "quiet"]
    assert written == [True]
    decode.pool.check()


def test_death_of_prefill_before_the_engine_answers_gives_the_later_grant_back():
    network, prefill, decode = sides()
    decode.auto = False
    prefill.offer(decode.target, 3)
    network.run()
    prefill.inner.kill()
    network.run()
    (key,) = decode.asked
    assert decode.log[key] == ["reserve", "failed"]
    decode.answer(key)
    network.run()
    assert decode.log[key] == ["reserve", "failed", "quiet"]
    decode.pool.check()
    assert decode.pool.ledger.num_held == 0


def test_repeated_messages_change_nothing():
    network, prefill, decode = sides(Faults(duplicate=lambda data: True), Faults(duplicate=lambda data: True))
    t, key = shipped(network, prefill, decode)
    prefill.sender.commit(t, delta())
    network.run()
    assert decode.log[key] == ["reserve", "ready"]
    assert prefill.log[t] == ["granted", "done", "quiet"]
    assert len(decode.log) == 1


@pytest.mark.parametrize(("lost", "whose"), [(GrantRequest, "p"), (Grant, "d"), (Commit, "p"), (CommitAck, "d")])
def test_a_lost_message_ends_in_failure_not_in_silence(lost, whose):
    faults = Faults(drop=lambda data: isinstance(unpack(data), lost))
    network, prefill, decode = sides(faults if whose == "d" else None, faults if whose == "p" else None)
    t = prefill.offer(decode.target, 3)
    network.run()
    prefill.ship(t, 0, 3)
    prefill.sender.commit(t, delta())
    network.advance(60)
    network.run()
    assert prefill.log[t][-2:] == ["failed", "quiet"]
    prefill.pool.check()
    assert prefill.pool.ledger.num_held == 0
    for key, log in decode.log.items():
        assert log[-1] in ("ready", "quiet"), log
        if log[-1] == "ready":
            decode.finish(key)
    decode.pool.check()
    assert decode.pool.ledger.num_held == 0


def test_a_grant_whose_sender_does_nothing_ends_at_the_deadline_of_its_request():
    network, prefill, decode = sides()
    t = prefill.offer(decode.target, 3, deadline_s=5.0)
    network.run()
    network.advance(5.5)
    key = next(iter(decode.log))
    assert isinstance(decode.errors[key], errors.DeadlineExceeded)
    assert isinstance(prefill.errors[t], errors.DeadlineExceeded)
    assert decode.log[key] == ["reserve", "failed", "quiet"]


def test_a_commit_for_another_number_of_blocks_fails():
    network, prefill, decode = sides()
    t, key = shipped(network, prefill, decode)
    send = prefill.inner.send

    def lying(peer, data):
        message = unpack(data)
        if isinstance(message, Commit):
            data = pack(dataclasses.replace(message, block_count=2))
        send(peer, data)

    prefill.inner.send = lying
    prefill.sender.commit(t, delta())
    network.run()
    assert decode.log[key] == ["reserve", "failed", "quiet"]
    assert "commit of 2 blocks" in str(prefill.errors[t])


def test_unreadable_bytes_close_the_connection():
    network, prefill, decode = sides()
    t = prefill.offer(decode.target, 3)
    network.run()
    key = next(iter(decode.log))
    prefill.inner.send(next(iter(prefill.inner._ends)), b"\xc1")
    network.run()
    assert decode.log[key] == ["reserve", "failed", "quiet"]
    assert prefill.log[t] == ["granted", "failed", "quiet"]


def test_a_job_without_a_token_fails_and_what_was_shipped_is_quiet():
    """Such is the end of a copy alone."""
    network, prefill, decode = sides()
    t, key = shipped(network, prefill, decode)
    prefill.sender.commit(t, None)
    network.run()
    assert decode.log[key] == ["reserve", "failed", "quiet"]
    assert isinstance(prefill.errors[t], errors.TransferFailed)
    decode.pool.check()
    prefill.pool.check()
