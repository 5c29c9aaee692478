"""Learned rates move towards what is observed, and only pure steps count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from kvferry.engine.engine import Engine
from kvferry.engine.events import Stepped
from kvferry.engine.step_slices import Slice
from kvferry.placement.types import STREAM_SHARE
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.lease import Rates
from kvferry.worker.rates import RateMeter, warm_up


def step(seconds: float, prefill: int, decode: int) -> Stepped:
    return Stepped(seconds, prefill, decode, 0, 0)


def test_rates_follow_observations() -> None:
    meter = RateMeter(Rates(100.0, 1.0, 1.0))
    for _ in range(200):
        meter.stepped(step(0.1, 100, 0))
        meter.stepped(step(0.02, 0, 4))
        meter.shipped(10_000, 0.01)
    rates = meter.rates
    assert abs(rates.prefill_tokens_per_s - 1000) < 1
    assert abs(rates.step_s - 0.02) < 1e-3
    assert abs(rates.ship_bytes_per_s - 1e6) < 1e3


def test_mixed_small_and_empty_observations_teach_nothing() -> None:
    meter = RateMeter(Rates(100.0, 1.0, 1.0))
    meter.stepped(step(0.1, 100, 1))
    meter.stepped(step(0.1, 3, 0))
    meter.stepped(step(0.0, 0, 1))
    meter.shipped(0, 1.0)
    assert meter.rates == Rates(100.0, 1.0, 1.0, alone_s=1.0, stream_s=STREAM_SHARE)


def test_a_node_learns_what_each_stream_adds_whatever_runs_now() -> None:
    meter = RateMeter(Rates(100.0, 0.010, 1.0))
    for turn in range(2000):
        streams = (1, 2, 16, 33)[turn % 4]
        meter.stepped(step(0.012 + 0.0005 * (streams - 1), 0, streams))
    learned = meter.rates
    assert learned.alone_s == pytest.approx(0.012, rel=0.01)
    assert learned.stream_s == pytest.approx(0.0005, rel=0.02)
    for _ in range(200):
        meter.stepped(step(0.013, 0, 1))
    assert meter.rates.stream_s == learned.stream_s, "it stays known while no streams run beside each other"


def test_accepted_drafts_are_tokens_of_the_same_streams() -> None:
    meter = RateMeter(Rates(100.0, 0.010, 1.0))
    for _ in range(1000):
        meter.stepped(Stepped(0.010 * 3, 0, 9, 0, 0, drafted=8, accepted=6))
    assert meter.rates.stream_s == pytest.approx(0.0, abs=1e-6)


def test_prompts_beside_streams_count_among_what_streams_wait_for() -> None:
    meter = RateMeter(Rates(100.0, 0.010, 1.0))
    for turn in range(2000):
        meter.stepped(step(0.110 if turn % 10 == 0 else 0.010, 256 if turn % 10 == 0 else 0, 5))
        meter.stepped(step(0.5, 256, 1))
    assert meter.rates.alone_s == 0.010
    assert 4 * meter.rates.stream_s == pytest.approx(0.010, rel=0.3)


MODEL = SimpleNamespace(device=SimpleNamespace(type="cpu"), info=SimpleNamespace(name="tiny", groups=None))


def warmed(monkeypatch: pytest.MonkeyPatch, budget: int, token_s: float, slow_turn: int = 0) -> tuple[Rates, list[int]]:
    """Rates and chunk lengths of a warm-up on an engine that takes `token_s` per token, and ten times that in its first
    turn and in `slow_turn`."""
    clock, chunks = [0.0], []

    def run(slices: list[Slice]) -> None:
        chunks.append(slices[0].count)
        clock[0] += slices[0].count * token_s * (10 if (len(chunks) - 1) // 2 in (0, slow_turn) else 1)

    monkeypatch.setattr("kvferry.worker.rates.time", SimpleNamespace(monotonic=lambda: clock[0]))
    config = SimpleNamespace(
        block_size=16, max_model_len=100_000, limits=SimpleNamespace(max_num_batched_tokens=budget)
    )
    pool, runner = SimpleNamespace(num_blocks=10_000), SimpleNamespace(run=run, model=MODEL)
    engine = SimpleNamespace(config=config, pool=pool, runner=runner, draft_model=None, states=None)
    rates = warm_up(cast(Engine, engine))
    return rates, [count for count in chunks if count != 1]


def test_a_fast_device_is_warmed_up_with_whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    rates, chunks = warmed(monkeypatch, 8192, 1e-6)
    assert chunks == [64, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 8192]
    assert rates.prefill_tokens_per_s == pytest.approx(1e6)
    assert rates.step_s == pytest.approx(1e-6)


def test_a_slow_device_is_not_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    rates, chunks = warmed(monkeypatch, 256, 1e-3)
    assert chunks == [64, 64, 128, 128]
    assert rates.prefill_tokens_per_s == pytest.approx(1000)


def test_a_step_smaller_than_the_first_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    assert warmed(monkeypatch, 8, 1e-6)[1] == [8, 8, 8]


def test_one_slow_turn_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when other processes of the cluster start on the same cores."""
    rates, chunks = warmed(monkeypatch, 256, 1e-3, slow_turn=1)
    assert chunks == [64, 64, 64, 128]
    assert rates.prefill_tokens_per_s == pytest.approx(1000)


def test_a_model_whose_first_step_fails_is_named() -> None:
    def run(slices: list[Slice]) -> None:
        raise RuntimeError("no kernel for\nthis head dim")

    config = SimpleNamespace(block_size=16, max_model_len=100, limits=SimpleNamespace(max_num_batched_tokens=64))
    runner = SimpleNamespace(run=run, model=MODEL)
    pool = SimpleNamespace(num_blocks=10)
    engine = SimpleNamespace(config=config, pool=pool, runner=runner, draft_model=None, states=None)
    with pytest.raises(
        ConfigError, match=r"tiny cannot be run: its first step failed with RuntimeError: no kernel for$"
    ):
        warm_up(cast(Engine, engine))


def test_an_encoders_rate_is_learned_from_its_second_image_on() -> None:
    meter = RateMeter(Rates())
    found = []
    for seconds in (9.0, 1.0, 2.0, 0.0):
        meter.encoded(100, seconds)
        found.append(meter.rates.media_tokens_per_s)
    assert found == [0.0, 100.0, 95.0, 95.0]
