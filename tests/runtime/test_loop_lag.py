"""A loop that is held is late, and anyone who had no core is not blamed."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry

from kvferry.protocol.loop_metrics import LoopMetrics
from kvferry.runtime.loop_lag import PERIOD_S, LoopLag, watched


def total(metrics: LoopMetrics) -> tuple[float, float, float]:
    """Looks, the lag of all, and what was spent without a core."""
    values = {sample.name: sample.value for sample in next(iter(metrics.lag.collect())).samples}
    held = next(s.value for s in next(iter(metrics.core_wait.collect())).samples if s.name.endswith("_total"))
    return values["kvferry_event_loop_lag_seconds_count"], values["kvferry_event_loop_lag_seconds_sum"], held


async def test_lateness_is_told_apart_from_waiting_for_a_core() -> None:
    now, held = [100.0], [7.0]
    metrics = LoopMetrics(CollectorRegistry())
    lag = LoopLag(metrics, lambda: held[0], lambda: now[0])
    lag.start()
    now[0], held[0] = now[0] + PERIOD_S + 0.4, 7.3
    lag.sample()
    lag.stop()
    count, late_s, without_s = total(metrics)
    assert count == 1
    assert abs(late_s - 0.1) < 1e-9
    assert abs(without_s - 0.3) < 1e-9


async def test_a_loop_that_is_held_is_seen() -> None:
    metrics = LoopMetrics(CollectorRegistry())
    async with watched(metrics):
        until = time.thread_time() + 0.3
        while time.thread_time() < until:
            pass
        for _ in range(1000):
            await asyncio.sleep(0.01)
            if total(metrics)[0]:
                break
    looks, late_s, _ = total(metrics)
    assert looks
    assert late_s > 0.2
