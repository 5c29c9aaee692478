"""Learned rates of a node: moving averages over its own steps and ships, seeded by a warm-up at start."""

from __future__ import annotations

import math
import time

from engine.engine import Engine
from engine.events import Stepped
from engine.request import Request
from engine.scheduler import Slice
from protocol.messages import Job, Rates
from protocol.sampling import SamplingParams

WEIGHT = 0.1
"""Weight of a new observation in the moving averages."""
LEAST_TURNS, MOST_TURNS, WARM_UP_S = 2, 4, 0.4
"""Of the warm-up: further turns are begun until WARM_UP_S have passed."""
LEAST_PREFILL_TOKENS = 32
"""Steps with fewer prompt tokens say nothing about prefill speed."""


class RateMeter:
    """Observes, and answers with Rates."""

    def __init__(self, seed: Rates) -> None:
        self._prefill = seed.prefill_tokens_per_s
        self._step = seed.step_s
        self._ship = seed.ship_bytes_per_s

    @property
    def rates(self) -> Rates:
        return Rates(self._prefill, self._step, self._ship)

    def stepped(self, step: Stepped) -> None:
        """A pure prefill step tells tokens per second, a pure decode step seconds per step."""
        if step.seconds <= 0:
            return
        if not step.decode_tokens and step.prefill_tokens >= LEAST_PREFILL_TOKENS:
            self._prefill += WEIGHT * (step.prefill_tokens / step.seconds - self._prefill)
        elif not step.prefill_tokens:
            self._step += WEIGHT * (step.seconds - self._step)

    def shipped(self, num_bytes: int, seconds: float) -> None:
        """A ship of `num_bytes` took `seconds`."""
        if seconds > 0 and num_bytes:
            self._ship += WEIGHT * (num_bytes / seconds - self._ship)


def warm_up(engine: Engine) -> Rates:
    """Run a prefill chunk and a decode step on the unused pool, at least twice, and more often as long as that takes no
    time to speak of. First calls compile kernels and allocate workspaces, which no request should wait for; the fastest
    turn counts, since other processes that start on the machine at the same time only ever make one slower."""
    bs = engine.config.block_size
    room = min(engine.config.max_model_len, engine.pool.num_blocks * bs) - 1
    length = max(1, min(engine.config.limits.max_num_batched_tokens, room - 1))
    job = Job("warm-up", 0, (1,) * (length + 1), length, SamplingParams(temperature=0.0), "")
    request = Request(job, b"", bs)
    request.block_ids = list(range(-(-(length + 1) // bs)))
    best = {length: math.inf, 1: math.inf}
    enough = time.monotonic() + WARM_UP_S
    for turn in range(MOST_TURNS):
        if turn >= LEAST_TURNS and time.monotonic() > enough:
            break
        for start, count in ((0, length), (length, 1)):
            began = time.monotonic()
            engine.runner.run([Slice(request, start, count)])
            best[count] = min(best[count], time.monotonic() - began)
    return Rates(prefill_tokens_per_s=length / best[length], step_s=best[1])
