"""Measures the engine's overhead per step outside the model: scheduling, batch plan, sampling and events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from kvferry.engine.engine import Engine
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate

STREAMS = (1, 8, 32)
PROMPT, STEPS = 48, 40
KINDS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=STEPS + 8, ignore_eos=True),
    "temperature": SamplingParams(temperature=1.0, seed=1, max_tokens=STEPS + 8, ignore_eos=True),
    "top_p 0.95": SamplingParams(temperature=0.7, top_p=0.95, seed=1, max_tokens=STEPS + 8, ignore_eos=True),
}


class Timed:
    """Model that adds up the seconds it computes."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.seconds = 0.0
        self.forward = self._measured(model.forward)
        self.logits = self._measured(model.logits)
        self.next_logits = self._measured(model.next_logits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _measured(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*arguments: Any) -> Any:
            begun = time.perf_counter()
            result = call(*arguments)
            self.seconds += time.perf_counter() - begun
            return result

        return measured


def bench_overhead(engine: Engine) -> None:
    """Print the median decode step, and its part outside the model, by batch size and kind of sampling."""
    runner = engine.runner
    model = runner.model
    runner.model = timed = Timed(model)
    try:
        for streams in STREAMS:
            for kind, params in KINDS.items():
                whole, rest = decode(engine, timed, streams, params)
                print(
                    f"step of {streams:2} streams, {kind:11} {whole * 1e3:9.3f} ms, of which outside the model "
                    f"{rest * 1e3:7.3f} ms ({100 * rest / whole:4.1f} %)",
                    flush=True,
                )
    finally:
        runner.model = model


def decode(engine: Engine, model: Timed, streams: int, params: SamplingParams) -> tuple[float, float]:
    """Return median seconds of a decode step, and of its part outside the model."""
    stamp = time.monotonic_ns()
    for stream in range(streams):
        tokens = tuple(1000 + (stamp + 7919 * (stream * PROMPT + i)) % 30000 for i in range(PROMPT))
        engine.add(Job(f"{stamp}-{stream}", 0, tokens, PROMPT, Generate(params), "bench"))
    while engine.request_table.waiting or any(request.uncomputed > 1 for request in engine.request_table.running):
        engine.step()
    whole, rest = [], []
    while len(engine.request_table.running) == streams:
        model.seconds, begun = 0.0, time.perf_counter()
        engine.step()
        engine.load()
        engine.events.clear()
        whole.append(time.perf_counter() - begun)
        rest.append(whole[-1] - model.seconds)
    while engine.has_work():
        engine.step()
    engine.events.clear()
    return statistics.median(whole), statistics.median(rest)
