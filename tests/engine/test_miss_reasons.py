"""An engine that lacks what was predicted there says why, of each token, as it saw it happen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.engine.engine import Engine
from kvferry.engine.events import Generated
from kvferry.engine.miss_reasons import REMEMBERED, MissReasons
from kvferry.engine.request import Request
from kvferry.protocol.errors import TransferFailed
from kvferry.protocol.hashing import chain, root_hash
from kvferry.protocol.prefix_reuse import Missed, Reuse
from tests.toy import finish, make_engine, make_job

PROMPT = list(range(1, 41))
BLOCK = 4


def asked(engine: Engine, name: str, tokens: list[int], predicted: int, epoch: int = 0) -> Reuse:
    """The account of a prompt of which so many tokens were predicted to be here, in the process of that epoch."""
    engine.add(replace(make_job(name, tokens, max_tokens=2), predicted=(predicted, epoch)))
    finish(engine)
    account = next(e.delta.reuse for e in engine.events if isinstance(e, Generated) and e.key[0] == name)
    assert account is not None
    assert account.balanced
    engine.check_integrity()
    return account


def test_what_is_here_is_not_missed() -> None:
    engine = make_engine()
    asked(engine, "first", PROMPT, 0)
    account = asked(engine, "again", [*PROMPT, 7], 40)
    assert (account.cached_len, account.missed) == (40, ())


def test_luck_is_no_miss() -> None:
    engine = make_engine()
    asked(engine, "first", PROMPT, 0)
    assert asked(engine, "again", [*PROMPT, 7], 16).missed == ()


def test_evicted_since() -> None:
    """Leaves go first: what is left of the prefix is reused, and the rest is named."""
    engine = make_engine(num_blocks=16)
    asked(engine, "first", PROMPT, 0)
    asked(engine, "other", list(range(50, 82)), 0)
    account = asked(engine, "again", [*PROMPT, 7], 40)
    assert 0 < account.cached_len < 40
    assert account.missed == (("evicted", 40 - account.cached_len),)


def test_a_ship_that_never_arrived() -> None:
    engine = make_engine()
    engine.reserve("grant", make_job("shipped", PROMPT))
    engine.stepper.admit_grants()
    engine.withdraw("grant", TransferFailed("the link broke"))
    engine.transfer_holds.grant_quiet("grant")
    assert asked(engine, "again", [*PROMPT, 7], 40).missed == (("not_arrived", 40),)


def test_a_copy_that_never_arrived() -> None:
    engine = make_engine()
    hashes = chain(root_hash("toy", ""), PROMPT, BLOCK)
    engine.copies.reserve("copy", hashes, 8)
    engine.copies.quiet("copy")
    assert asked(engine, "again", [*PROMPT, 7], 40).missed == (("not_arrived", 32), ("unknown", 8))


def test_what_a_copy_brought_is_here() -> None:
    engine = make_engine()
    engine.copies.reserve("copy", chain(root_hash("toy", ""), PROMPT, BLOCK), 10)
    engine.copies.land("copy")
    account = asked(engine, "again", [*PROMPT, 7], 40)
    assert (account.cached_len, account.missed) == (40, ())
    assert not engine.pool.miss_reasons._young


def test_what_was_found_to_be_wrong() -> None:
    engine = make_engine()
    asked(engine, "first", PROMPT, 0)
    found = engine.pool.match(chain(root_hash("toy", ""), PROMPT, BLOCK))
    engine.pool.forget(found[6:])
    account = asked(engine, "again", [*PROMPT, 7], 40)
    assert (account.cached_len, account.missed) == (24, (("retracted", 16),))


def test_what_an_earlier_process_had() -> None:
    engine = make_engine()
    engine.pool.miss_reasons.epoch = 8
    assert asked(engine, "a", PROMPT, 36, epoch=7).missed == (("fenced", 36),)
    assert asked(engine, "b", list(range(60, 80)), 16, epoch=8).missed == (("unknown", 16),)


def test_what_another_request_computes_at_that_moment() -> None:
    """As where many come at once with the same beginning, and all but the first are predicted to find it."""
    engine = make_engine()
    engine.add(make_job("first", PROMPT))
    account = asked(engine, "beside", [*PROMPT, 7], 40)
    assert (account.cached_len, account.missed) == (40, ()), "it waits for them"
    assert asked(engine, "later", [*PROMPT, 8], 40).missed == ()
    assert not engine.pool.miss_reasons._young


def test_what_nobody_here_knows_of() -> None:
    assert asked(make_engine(), "a", PROMPT, 36).missed == (("unknown", 36),)


def test_it_is_told_of_the_first_admission_alone() -> None:
    """Preempted requests are computed again, which no prediction was about."""
    engine = make_engine(num_blocks=12, budget=64, beside=64)
    for i in range(4):
        engine.add(replace(make_job(f"r{i}", list(range(i, i + 10)), max_tokens=20), predicted=(8, 0)))
    finish(engine)
    assert engine.scheduler.preempted_total > 0
    told = [e.delta.reuse.missed for e in engine.events if isinstance(e, Generated) and e.delta.reuse]
    assert told == [(("unknown", 8),)] * 4


def test_a_wrong_account_of_misses_does_not_balance() -> None:
    assert not Reuse(8, computed=8, missed=(("evicted", 9),)).balanced
    assert not Reuse(8, computed=8, missed=(("evicted", -1),)).balanced
    assert not Reuse(8, computed=8, missed=(("bored", 1),)).balanced


@pytest.mark.parametrize(
    ("start", "until", "missed"),
    [
        (0, 8, (("evicted", 4), ("not_arrived", 4))),
        (2, 7, (("evicted", 2), ("not_arrived", 3))),
        (5, 12, (("not_arrived", 3), ("unknown", 4))),
        (8, 8, ()),
        (9, 4, ()),
    ],
)
def test_tokens_of_blocks_in_part(start: int, until: int, missed: Missed) -> None:
    request = looking_for(2, until)
    request.computed_len = start
    miss_reasons = MissReasons(8)
    miss_reasons.note(request.hashes[:1], "evicted")
    miss_reasons.note(request.hashes[1:], "not_arrived")
    assert miss_reasons.missed(request) == missed


def looking_for(blocks: int, predicted: int) -> Request:
    job = make_job("a", list(range(blocks * BLOCK)))
    return Request(replace(job, predicted=(predicted, 0)), root_hash("toy", ""), BLOCK)


def test_memory_is_bounded_and_the_young_are_kept() -> None:
    miss_reasons, request = MissReasons(8), looking_for(16, 64)
    miss_reasons.note([bytes([i]) for i in range(200)], "evicted")
    miss_reasons.note(request.hashes, "evicted")
    kept = len(miss_reasons._young) + len(miss_reasons._old)
    assert 8 * REMEMBERED // 2 <= kept <= 8 * REMEMBERED
    assert miss_reasons.missed(request) == (("evicted", 64),)
    miss_reasons.arrived(request.hashes[-1])
    assert miss_reasons.missed(request) == (("evicted", 60), ("unknown", 4))
