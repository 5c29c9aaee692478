"""Random interleavings of everything that can happen to ships: whatever the order, every offer and every grant ends,
the books balance, and no block without a hold is ever written to."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.kv_transfer.send_window import SendWindow
from kvferry.protocol.errors import Cancelled, NodeLost
from tests.kv_transfer.fault_injection import Faults
from tests.kv_transfer.loopback import LoopbackNetwork
from tests.kv_transfer.ship_kit import BLOCK_BYTES, DecodeSide, Lending, Pool, PrefillSide, delta


@pytest.fixture(autouse=True)
def known_nonces() -> Iterator[None]:
    """What comes from the system's generator differs between two runs of one example."""
    with patch("kvferry.kv_transfer.retransmission.secrets.randbelow", lambda most: 7):
        yield


class Ships(RuleBasedStateMachine):
    """One prefill process and one decode process at a time; a killed one is started again at another address."""

    kind: type[Pool] = Pool

    def __init__(self) -> None:
        super().__init__()
        self.slices = patch("kvferry.kv_transfer.receiver.POSTED_AT_ONCE", 2)
        self.slices.start()
        self.network = LoopbackNetwork()
        self.faults = Faults(
            drop=lambda data: self.drops > 0 and zlib.crc32(data) % self.drops == 0,
            duplicate=lambda data: zlib.crc32(data) % 7 == 0,
            corrupt=lambda tag: tag % 11 == 3,
        )
        self.lossy, self.drops = False, 0
        self.starts = 0
        self.prefill, self.decode = self.start(PrefillSide), self.start(DecodeSide)
        self.shipped: dict[int, int] = {}

    def start(self, side):
        self.starts += 1
        options = {"window": SendWindow(2 * BLOCK_BYTES), "pool": self.kind}
        return side(self.network, f"{side.__name__}:{self.starts}", self.faults, **options)

    def live(self) -> list[int]:
        return [t for t, log in self.prefill.log.items() if log == ["granted"]]

    @rule(blocks=st.integers(1, 6))
    def offer(self, blocks):
        transfer = self.prefill.offer(self.decode.target, blocks, deadline_s=20.0)
        if transfer is not None:
            self.shipped[transfer] = 0

    @rule(choices=st.lists(st.integers(0, 1000), min_size=1, max_size=25))
    def steps(self, choices):
        for choice in choices:
            if self.network.pending:
                self.network.step(choice)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), count=st.integers(1, 4))
    def ship(self, data, count):
        transfer = data.draw(st.sampled_from(self.live()))
        first = self.shipped[transfer]
        self.shipped[transfer] = last = min(first + count, len(self.prefill.blocks[transfer]))
        self.prefill.ship(transfer, first, last)
        if last == len(self.prefill.blocks[transfer]) and first != last:
            self.prefill.sender.commit(transfer, delta())

    @precondition(lambda self: self.prefill.log)
    @rule(data=st.data())
    def abort(self, data):
        self.prefill.sender.abort(data.draw(st.sampled_from(sorted(self.prefill.log))), "test")

    @precondition(lambda self: self.decode.log)
    @rule(data=st.data())
    def cancel(self, data):
        self.decode.receiver.cancel(data.draw(st.sampled_from(list(self.decode.log))), Cancelled("test"))

    @rule(auto=st.booleans(), cached=st.integers(0, 3))
    def decode_mood(self, auto, cached):
        self.decode.auto, self.decode.cached = auto, cached

    @precondition(lambda self: self.decode.asked)
    @rule(data=st.data())
    def answer(self, data):
        self.decode.answer(data.draw(st.sampled_from(self.decode.asked)))

    @rule()
    def deliver(self):
        self.network.run()

    @rule(blocks=st.integers(1, 6))
    def offer_and_deliver(self, blocks):
        self.offer(blocks)
        self.network.run()

    @precondition(lambda self: self.live())
    @rule()
    def ship_everything(self):
        for transfer in self.live():
            blocks = len(self.prefill.blocks[transfer])
            self.prefill.ship(transfer, self.shipped[transfer], blocks)
            if self.shipped[transfer] < blocks:
                self.prefill.sender.commit(transfer, delta())
            self.shipped[transfer] = blocks

    @rule(luck=st.integers(0, 4))
    def kill_prefill(self, luck):
        if not luck:
            self.prefill.inner.kill()
            self.prefill, self.shipped = self.start(PrefillSide), {}

    @rule(luck=st.integers(0, 4))
    def kill_decode(self, luck):
        if not luck:
            self.decode.inner.kill()
            self.decode = self.start(DecodeSide)

    @precondition(lambda self: self.decode.inner._ends)
    @rule(data=st.data(), luck=st.integers(0, 2))
    def sever(self, data, luck):
        if luck:
            return
        peer = data.draw(st.sampled_from(list(self.decode.inner._ends)))
        self.decode.link.submit(lambda: self.decode.link.sever(peer, NodeLost("severed")))

    @rule(seconds=st.sampled_from([0.3, 4.0, 35.0]))
    def wait(self, seconds):
        self.network.advance(seconds)

    @rule(drops=st.sampled_from([0, 0, 0, 5]))
    def weather(self, drops):
        self.drops = drops
        self.lossy |= drops > 0

    @invariant()
    def books_balance(self):
        self.prefill.pool.check()
        self.decode.pool.check()
        for side in (self.prefill, self.decode):
            assert all(side.pool.ledger.held(block_id) for block_id in side.watched.posted), "posted, but released"
        for log in self.prefill.log.values():
            assert log.count("done") + log.count("failed") <= 1, log
            assert log.count("quiet") <= 1, log
            assert "quiet" not in log or log.index("quiet") == len(log) - 1, log

    def teardown(self):
        """Time passes and the engines answer: everything must end by itself."""
        self.slices.stop()
        for key in tuple(self.decode.asked):
            self.decode.answer(key)
        self.decode.auto = True
        self.network.run()
        for transfer in self.live():
            self.prefill.sender.abort(transfer, "teardown")
        self.network.run()
        self.network.advance(200.0)
        self.network.run()
        for log in self.prefill.log.values():
            assert log[-1] == "quiet", log
            assert log[-2] in ("done", "failed"), log
        for key, log in self.decode.log.items():
            assert log[-1] in ("ready", "quiet", "refused") or log[-2:] == ["refused", "quiet"], log
            if log[-1] == "ready":
                self.decode.finish(key)
        self.books_balance()
        assert self.prefill.pool.ledger.num_held == self.decode.pool.ledger.num_held == 0
        assert not self.prefill.sender.transfers or self.lossy
        assert not self.decode.receiver.transfers


Ships.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestShips = Ships.TestCase


class LentShips(Ships):
    """Of memory that lends what blocks leave from and land in: every row comes back."""

    kind = Lending

    def teardown(self):
        super().teardown()
        assert not self.prefill.pool.transfer_holds
        assert not self.decode.pool.transfer_holds


LentShips.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestLentShips = LentShips.TestCase


def test_rows_are_given_back_once_no_checksum_looks_at_them():
    network = LoopbackNetwork()
    prefill, decode = PrefillSide(network, "p:1", pool=Lending), DecodeSide(network, "d:1", pool=Lending)
    transfer = prefill.offer(decode.target, 6)
    network.run()
    prefill.ship(transfer, 0, 6)
    prefill.sender.commit(transfer, delta())
    network.run()
    assert (prefill.log[transfer], prefill.errors, decode.errors) == (["granted", "done", "quiet"], {}, {})
    assert not prefill.pool.transfer_holds
    assert not decode.pool.transfer_holds
