"""Learned rates move towards what is observed, and only pure steps count."""

from __future__ import annotations

from engine.events import Stepped
from node.rates import RateMeter
from protocol.messages import Rates


def step(seconds: float, prefill: int, decode: int) -> Stepped:
    return Stepped(seconds, prefill, decode, 1, 0, 0)


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
    assert meter.rates == Rates(100.0, 1.0, 1.0)
