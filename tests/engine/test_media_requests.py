"""Requests with images in the engine: rows in place of placeholders, however prompts are cut, cached or preempted."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from kvferry.engine.engine import Engine
from kvferry.engine.events import Failed, Generated
from kvferry.engine.request_states import State
from kvferry.protocol.errors import GrantRefused, InvalidRequest
from kvferry.protocol.media import MediaItem
from kvferry.protocol.messages import TokenDelta
from tests.media_parts import (
    PLACEHOLDER,
    FakeEncoder,
    HeldSource,
    SeeingToy,
    media_job,
    prompt_of,
    seeing_engine,
    seen,
)
from tests.toy import finish, make_job, tokens_of

Prompt = tuple[list[int], tuple[MediaItem, ...]]


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(PLACEHOLDER), k=length)


def model_of(engine: Engine) -> SeeingToy:
    model = engine.runner.model
    assert isinstance(model, SeeingToy)
    return model


PROMPTS = [
    prompt_of(text(3), b"one", text(4, 1)),
    prompt_of(b"one", b"two", text(2)),
    prompt_of(text(9), b"a long one", text(1), b"two", text(7, 2), length=11),
    prompt_of(text(6), b"last"),
]


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("budget", [3, 8, 64])
def test_rows_stand_for_placeholders_wherever_a_prompt_is_cut(budget: int, rope: bool) -> None:
    engine = seeing_engine(FakeEncoder(rope=rope), budget=budget, beside=budget, seqs=3)
    engine.add(make_job("text", text(7, 9), max_tokens=30))
    for number, prompt in enumerate(PROMPTS):
        engine.add(media_job(str(number), prompt, rope=rope))
    finish(engine)
    for number, prompt in enumerate(PROMPTS):
        assert tokens_of(engine, str(number)) == seen(prompt, 8, rope=rope)
    assert tokens_of(engine, "text") == seen((text(7, 9), ()), 30)


def test_drafts_and_offsets_of_streams_go_together() -> None:
    prompt = prompt_of([1, 2] * 9, b"one", [1, 2] * 9)
    engine = seeing_engine(FakeEncoder(rope=True), drafts=3, budget=64)
    engine.add(media_job("a", prompt, 40, rope=True))
    finish(engine)
    assert tokens_of(engine, "a") == seen(prompt, 40, rope=True)


def test_a_batch_without_shifted_positions_has_none() -> None:
    engine = seeing_engine()
    engine.add(media_job("a", PROMPTS[0]))
    finish(engine)
    assert all(plan.rope_positions is None for plan in model_of(engine).plans)
    assert [plan.media is not None for plan in model_of(engine).plans] == [True] + [False] * 7


def test_cached_images_are_not_asked_for_again() -> None:
    encoder, prompt = FakeEncoder(), prompt_of(text(2), b"one", text(4, 1))
    engine = seeing_engine(encoder)
    engine.add(media_job("a", prompt))
    finish(engine)
    longer = (prompt[0] + text(9, 3), prompt[1])
    engine.add(media_job("b", longer))
    finish(engine)
    assert tokens_of(engine, "b") == seen(longer, 8)
    assert len(encoder.encoded) == 1
    half = (prompt[0][:6] + text(4, 4), (replace(prompt[1][0], length=4),))
    engine.add(media_job("c", half))
    finish(engine)
    assert len(encoder.encoded) == 2, "its second block holds the image's end"


def test_other_images_with_equal_placeholders_share_no_block() -> None:
    engine = seeing_engine()
    for name in (b"one", b"two"):
        prompt = prompt_of(text(4), name, text(8, 1))
        engine.add(media_job(name.decode(), prompt))
        finish(engine)
        assert tokens_of(engine, name.decode()) == seen(prompt, 8)
    first, second = (
        next(e.delta.reuse for e in engine.events if isinstance(e, Generated) and e.key[0] == name)
        for name in ("one", "two")
    )
    assert first is not None
    assert second is not None
    assert (first.cached_len, second.cached_len) == (0, 4), "the text before the image"


def test_tenants_and_forks() -> None:
    """A fork copies its parent's last block only if that holds the same image."""
    encoder = FakeEncoder()
    engine = seeing_engine(encoder)
    prompt, other = prompt_of(text(4), b"one", text(1)), prompt_of(text(4), b"two", text(1))
    for name, of, parent, namespace in (
        ("parent", prompt, "", ""),
        ("child", prompt, "parent", ""),
        ("stranger", other, "parent", ""),
        ("tenant", prompt, "", "1:t"),
    ):
        engine.add(media_job(name, of, fork_of=parent, namespace=namespace))
        finish(engine)
        assert tokens_of(engine, name) == seen(of, 8)
    reused = {e.key[0]: e.delta.reuse.cached_len for e in engine.events if isinstance(e, Generated) and e.delta.reuse}
    assert reused == {"parent": 0, "child": 9, "stranger": 4, "tenant": 0}
    assert len(encoder.encoded) == 3


def test_preempted_requests_are_computed_with_their_images_again() -> None:
    encoder = FakeEncoder(rope=True)
    engine = seeing_engine(encoder, num_blocks=16, caching=False)
    prompts = [prompt_of(text(3, seed), b"%d" % seed, text(5, seed)) for seed in range(4)]
    for number, prompt in enumerate(prompts):
        engine.add(media_job(str(number), prompt, 20, rope=True))
    finish(engine)
    assert engine.scheduler.preempted_total
    assert len(encoder.encoded) == 4 + engine.scheduler.preempted_total
    for number, prompt in enumerate(prompts):
        assert tokens_of(engine, str(number)) == seen(prompt, 20, rope=True)


def test_others_pass_a_request_whose_rows_are_not_here() -> None:
    source = HeldSource()
    engine = seeing_engine(source=source)
    engine.add(media_job("image", PROMPTS[0]))
    engine.add(make_job("text", text(9), max_tokens=3))
    finish(engine)
    assert tokens_of(engine, "text") == seen((text(9), ()), 3)
    assert tokens_of(engine, "image") == []
    (request,) = engine.request_table
    assert (request.state, request.block_ids) == (State.AWAITING, [])
    source.answer()
    finish(engine)
    assert tokens_of(engine, "image") == seen(PROMPTS[0], 8)
    assert source.calls == []


def test_who_computes_a_shared_beginning_asks_alone() -> None:
    source = HeldSource()
    engine = seeing_engine(source=source, budget=4)
    prompt = prompt_of(text(5), b"one", text(9, 1))
    engine.add(media_job("a", prompt))
    engine.step()
    source.answer()
    engine.step()
    engine.add(media_job("b", (prompt[0] + [7], prompt[1])))
    finish(engine)
    assert source.calls == []
    assert tokens_of(engine, "b") == seen((prompt[0] + [7], prompt[1]), 8)


def test_a_request_that_leaves_cancels_its_call_and_late_rows_are_ignored() -> None:
    source = HeldSource()
    engine = seeing_engine(source=source)
    engine.add(media_job("a", PROMPTS[0]))
    engine.step()
    engine.cancel("a", 0)
    assert source.cancelled == 1
    source.answer()
    assert not engine.request_table
    finish(engine)


@pytest.mark.parametrize("error", [InvalidRequest("broken"), RuntimeError("odd")])
def test_rows_that_cannot_be_made_fail_their_request_alone(error: Exception) -> None:
    source = HeldSource()
    engine = seeing_engine(source=source)
    engine.add(media_job("a", PROMPTS[0]))
    engine.add(make_job("b", [1, 2, 3]))
    engine.step()
    source.answer(error)
    finish(engine)
    (failed,) = (e for e in engine.events if isinstance(e, Failed))
    assert failed.key == ("a", 0)
    assert failed.error.code == ("invalid_request_error" if isinstance(error, InvalidRequest) else "step_failed")
    assert tokens_of(engine, "b") == seen(([1, 2, 3], ()), 8)


@pytest.mark.parametrize(
    ("change", "encoder"),
    [
        ({"media": (MediaItem("audio", "h", 3, 5, b"x"),)}, FakeEncoder()),
        ({"media": (MediaItem("image", "h", 10, 5, b"x"),)}, FakeEncoder()),
        ({"rope_offset": 1}, FakeEncoder()),
        ({}, None),
    ],
)
def test_media_that_the_engine_cannot_take_are_refused(change: dict[str, Any], encoder: FakeEncoder | None) -> None:
    engine = seeing_engine(FakeEncoder())
    engine.media.encoder = encoder
    engine.add(replace(media_job("a", PROMPTS[0]), **change))
    (failed,) = engine.events
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, InvalidRequest)


def arrive(engine: Engine, name: str, prompt: Prompt, *, rope: bool) -> int:
    """A prompt that comes by a grant, of a job without the media's data; its first token is returned."""
    tokens, media = prompt
    job = media_job(name, (tokens, tuple(replace(item, data=b"") for item in media)), 20)
    whole = media_job(name, prompt, 1, rope=rope)
    donor = seeing_engine(FakeEncoder(rope=rope))
    donor.add(whole)
    finish(donor)
    engine.reserve(name, replace(job, rope_offset=whole.rope_offset))
    engine.scheduler.admit_grants()
    request = engine.request_table.by_grant(name)
    assert request is not None
    own, theirs = engine.runner.kv, donor.runner.kv  # type: ignore[attr-defined]
    for place, block in enumerate(request.block_ids[: len(tokens) // 4]):
        own[block] = theirs[donor.pool.match(request.hashes)[place]]
    (first,) = tokens_of(donor, name)
    tail = len(tokens) % 4
    assert not tail, "whole blocks alone can be found at the donor"
    engine.start(name, TokenDelta(name, 0, 0, (first,)))
    return first


def test_a_stream_whose_prompt_arrived_goes_on_without_its_media() -> None:
    prompt = prompt_of(text(5), b"one", text(6, 1))
    encoder = FakeEncoder(rope=True)
    engine = seeing_engine(encoder)
    first = arrive(engine, "a", prompt, rope=True)
    finish(engine)
    assert [first, *tokens_of(engine, "a")] == seen(prompt, 20, rope=True)
    assert encoder.encoded == []


def test_a_stream_that_lost_blocks_with_media_goes_on_elsewhere() -> None:
    """Its node has no data of them; with blocks that are still cached it goes on here."""
    prompt = prompt_of(text(5), b"one", text(6, 1))
    engine = seeing_engine(FakeEncoder(rope=True))
    first = arrive(engine, "a", prompt, rope=True)
    (request,) = engine.request_table.running
    engine.step()
    engine.scheduler.preempt(request)
    engine.step()
    assert request.state is State.RUNNING
    blocks = list(request.block_ids)
    engine.scheduler.preempt(request)
    engine.pool.forget(blocks)
    assert not engine.step()
    finish(engine)
    assert [first, *tokens_of(engine, "a")] == seen(prompt, 3, rope=True)
    (failed,) = (e for e in engine.events if isinstance(e, Failed))
    assert isinstance(failed.error, GrantRefused)


def test_tokens_that_see_each_other_are_computed_in_one_step() -> None:
    prompt = prompt_of(text(3), b"one", text(1), b"two", text(5, 1), length=10)
    engine = seeing_engine(FakeEncoder(bidirectional=True), budget=4, beside=4, seqs=1)
    engine.add(media_job("a", prompt))
    finish(engine)
    assert tokens_of(engine, "a") == seen(prompt, 8)
    plans = model_of(engine).plans
    assert [plan.query_lens for plan in plans[:5]] == [(3,), (10,), (1,), (10,), (4,)]
    until = [plan.see_until for plan in plans]
    assert [None if each is None else each.tolist() for each in until[:5]] == [None, [12] * 10, None, [23] * 10, None]
    cached = prompt_of(text(3), b"one", text(9, 5), length=10)
    engine.add(media_job("b", cached))
    finish(engine)
    (first, *_) = plans[len(until) :]
    assert first.see_until is not None
    assert first.see_until.tolist() == [12, 13, 14, 15]
    assert tokens_of(engine, "b") == seen(cached, 8)
