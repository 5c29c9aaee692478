"""The sender against a real receiver on loopback."""

from __future__ import annotations

import dataclasses

import pytest

from kvferry.protocol import errors
from kvferry.protocol.link_messages import CommitAck
from kvferry.protocol.wire import unpack
from tests.kv_transfer.fault_injection import Faults
from tests.kv_transfer.loopback import LoopbackNetwork
from tests.kv_transfer.ship_kit import DecodeSide, PrefillSide, delta, job


@pytest.fixture
def sides():
    network = LoopbackNetwork()
    prefill, decode = PrefillSide(network, "p:1"), DecodeSide(network, "d:1")
    yield network, prefill, decode
    for pool in (prefill.pool, decode.pool):
        pool.check()


def test_blocks_shipped_in_chunks_are_ready_after_the_commit_only(sides):
    network, prefill, decode = sides
    t = prefill.offer(decode.target, 4)
    network.run()
    assert prefill.log[t] == ["granted"]
    prefill.ship(t, 0, 3)
    network.run()
    prefill.ship(t, 3, 4)
    network.run()
    (key,) = decode.log
    assert decode.log[key] == ["reserve"]
    prefill.sender.commit(t, delta(42))
    network.run()
    assert decode.log[key] == ["reserve", "ready"]
    assert decode.commits[key].first == delta(42)
    assert prefill.log[t] == ["granted", "done", "quiet"]
    assert (prefill.stats[t].blocks, prefill.stats[t].bytes) == (4, 256)
    decode.finish(key)


def test_stats_measure_what_is_sent_and_the_part_after_the_commit_and_no_compute():
    network = LoopbackNetwork()
    late = Faults(delay_s=lambda data: 0.5 if isinstance(unpack(data), CommitAck) else 0.0)
    prefill, decode = PrefillSide(network, "p:1"), DecodeSide(network, "d:1", late)
    t = prefill.offer(decode.target, 2)
    network.run()
    prefill.ship(t, 0, 2)
    network.run()
    network.advance(3.0)
    prefill.sender.commit(t, delta())
    network.run()
    network.advance(1.0)
    assert (prefill.stats[t].sending_s, prefill.stats[t].ship_s) == (0.0, pytest.approx(0.5))
    assert prefill.stats[t].exposed_s == pytest.approx(0.5)


def test_a_ship_that_is_posted_after_the_commit_hides_nothing(sides):
    network, prefill, decode = sides
    t = prefill.offer(decode.target, 2)
    network.run()
    prefill.ship(t, 0, 2)
    prefill.sender.commit(t, delta())
    network.now += 2.0
    network.run()
    assert (prefill.stats[t].ship_s, prefill.stats[t].exposed_s) == (2.0, 2.0)
    decode.finish(next(iter(decode.log)))


def test_the_bandwidth_of_a_ship_is_the_links_however_long_its_chunks_are_computed():
    """It took the time between them for its own: with seconds of compute, a thousandth of the link's."""
    network = LoopbackNetwork(rate=1 << 20)
    prefill = PrefillSide(network, "p:1", block_bytes=1 << 14)
    decode = DecodeSide(network, "d:1", block_bytes=1 << 14)
    t = prefill.offer(decode.target, 12)
    network.run()
    network.advance(1.0)
    for first in (0, 4, 8):
        network.advance(5.0)
        prefill.ship(t, first, first + 4)
        network.run()
    prefill.sender.commit(t, delta())
    network.run()
    network.advance(1.0)
    stats = prefill.stats[t]
    assert stats.bytes / stats.sending_s == pytest.approx(network.rate, rel=0.05)
    assert stats.ship_s == pytest.approx(12 * (1 << 14) / network.rate, rel=0.2)
    assert stats.exposed_s == pytest.approx(stats.ship_s / 3, rel=0.2)


@pytest.mark.parametrize("cached", [0, 3, 4])
def test_blocks_that_decode_holds_are_not_sent(sides, cached):
    network, prefill, decode = sides
    decode.cached = cached
    t = prefill.offer(decode.target, 4)
    network.run()
    assert prefill.first[t] == cached
    prefill.ship(t, 0, 4)
    prefill.sender.commit(t, delta())
    network.run()
    (key,) = decode.log
    assert decode.log[key][-1] == "ready"
    assert prefill.stats[t].blocks == 4 - cached
    decode.finish(key)


def test_ships_to_one_node_share_a_connection_and_a_new_one_is_made_after_a_loss(sides):
    network, prefill, decode = sides
    first = prefill.offer(decode.target, 1)
    second = prefill.offer(decode.target, 1)
    network.run()
    peers = {key[0] for key in decode.log}
    assert len(peers) == 1
    decode.inner.disconnect(peers.pop(), lambda: None)
    network.run()
    assert prefill.log[first] == prefill.log[second] == ["granted", "failed", "quiet"]
    third = prefill.offer(decode.target, 1)
    network.run()
    assert prefill.log[third] == ["granted"]
    prefill.sender.abort(third, "over")
    network.advance(100)
    network.run()
    decode.link.stop()


def test_wrong_fingerprint_or_epoch_is_refused_in_words(sides):
    network, prefill, decode = sides
    wrong = prefill.offer(dataclasses.replace(decode.target, fingerprint="0" * 32), 1)
    stale = prefill.offer(dataclasses.replace(decode.target, epoch=6), 1)
    network.run()
    assert prefill.log[wrong] == prefill.log[stale] == ["failed", "quiet"]
    assert isinstance(prefill.errors[wrong], errors.Incompatible)
    assert isinstance(prefill.errors[stale], errors.NodeLost)
    assert "epoch 7" in str(prefill.errors[stale])
    assert decode.log == {}


def test_a_node_that_cannot_be_reached_fails_the_offer(sides):
    network, prefill, decode = sides
    t = prefill.offer(dataclasses.replace(decode.target, link_address="gone:1"), 2)
    network.run()
    assert prefill.log[t] == ["failed", "quiet"]
    assert isinstance(prefill.errors[t], errors.NodeLost)
    assert "node d" in str(prefill.errors[t])


def test_a_node_that_drains_refuses_the_offer_and_is_not_taken_for_the_one_that_says_so(sides):
    network, prefill, decode = sides
    decode.reserve = lambda key, job: decode.receiver.refused(key, errors.Draining("d is draining"))
    t = prefill.offer(decode.target, 1)
    network.run()
    assert isinstance(prefill.errors[t], errors.GrantRefused)
    assert str(prefill.errors[t]) == "node d: d is draining"


def test_an_offer_without_an_answer_times_out_and_a_late_grant_is_given_back(sides):
    network, prefill, decode = sides
    decode.auto = False
    t = prefill.offer(decode.target, 3)
    network.run()
    network.advance(31)
    assert prefill.log[t] == ["failed", "quiet"]
    assert isinstance(prefill.errors[t], errors.GrantRefused)
    (key,) = decode.asked
    decode.answer(key)
    network.run()
    assert decode.log[key] == ["reserve", "failed", "quiet"]
    assert decode.pool.ledger.num_held == 0


def test_abort_when_the_grant_is_on_its_way_frees_both_sides(sides):
    network, prefill, decode = sides
    t = prefill.offer(decode.target, 3)
    while not decode.granted_ids:
        network.step()
    prefill.sender.abort(t, "cancelled")
    network.run()
    assert prefill.log[t] == ["failed", "quiet"]
    (key,) = decode.log
    assert decode.log[key] == ["reserve", "failed", "quiet"]
    assert decode.pool.ledger.num_held == prefill.pool.ledger.num_held == 0


@pytest.mark.parametrize("shipped", [0, 1, 4])
def test_abort_after_some_blocks_completes_all_receives_without_closing_the_connection(sides, shipped):
    network, prefill, decode = sides
    t = prefill.offer(decode.target, 4)
    network.run()
    prefill.ship(t, 0, shipped)
    prefill.sender.abort(t, "cancelled")
    other = prefill.offer(decode.target, 1)
    network.run()
    key = next(iter(decode.log))
    assert decode.log[key] == ["reserve", "failed", "quiet"]
    assert prefill.log[t] == ["granted", "failed", "quiet"]
    prefill.ship(other, 0, 1)
    prefill.sender.commit(other, delta())
    network.run()
    assert prefill.log[other] == ["granted", "done", "quiet"]
    decode.finish((key[0], other))


def test_a_commit_before_all_blocks_were_shipped_fails(sides):
    network, prefill, decode = sides
    t = prefill.offer(decode.target, 3)
    network.run()
    prefill.ship(t, 0, 2)
    prefill.sender.commit(t, delta())
    network.run()
    assert prefill.log[t] == ["granted", "failed", "quiet"]
    assert "2 of 3" in str(prefill.errors[t])
    assert decode.pool.ledger.num_held == 0


def test_a_block_outside_the_grant_or_twice_fails(sides):
    network, prefill, decode = sides
    outside, twice = prefill.offer(decode.target, 1), prefill.offer(decode.target, 2)
    network.run()
    prefill.sender.ship(outside, [(1, prefill.blocks[outside][0])])
    prefill.ship(twice, 0, 1)
    prefill.ship(twice, 0, 1)
    network.run()
    for t in (outside, twice):
        assert prefill.log[t] == ["granted", "failed", "quiet"]
    assert decode.pool.ledger.num_held == 0


def test_orders_for_an_ended_ship_are_ignored(sides):
    network, prefill, decode = sides
    t = prefill.offer(decode.target, 2)
    network.run()
    prefill.sender.abort(t, "over")
    prefill.ship(t, 0, 2)
    prefill.sender.commit(t, delta())
    prefill.sender.abort(t, "again")
    network.run()
    assert prefill.log[t] == ["granted", "failed", "quiet"]


def test_a_prompt_too_long_for_a_grant_request_is_refused_at_home(sides):
    network, prefill, decode = sides
    t = prefill.sender.offer(decode.target, dataclasses.replace(job(1), token_ids=(2**40,) * 600_000))
    prefill.log[t] = []
    network.run()
    assert prefill.log[t] == ["failed", "quiet"]
    assert isinstance(prefill.errors[t], errors.InvalidRequest)
    assert decode.log == {}


def test_death_of_decode_fails_the_ship(sides):
    network, prefill, decode = sides
    t = prefill.offer(decode.target, 4)
    network.run()
    prefill.ship(t, 0, 2)
    decode.inner.kill()
    network.run()
    assert prefill.log[t] == ["granted", "failed", "quiet"]
    assert isinstance(prefill.errors[t], errors.NodeLost)


def test_stopping_the_link_ends_every_ship(sides):
    network, prefill, decode = sides
    t = prefill.offer(decode.target, 4)
    network.run()
    prefill.link.stop()
    assert prefill.log[t] == ["granted", "failed", "quiet"]
    network.run()
    assert decode.pool.ledger.num_held == 0
