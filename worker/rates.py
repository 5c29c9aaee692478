"""Learned speeds of a node, announced in its lease: moving averages over steps and ships, seeded by a warm-up."""

from __future__ import annotations

import logging
import math
import time

from kvferry.engine.engine import Engine
from kvferry.engine.events import Stepped
from kvferry.engine.request import Request
from kvferry.engine.runner import StepRunner
from kvferry.engine.sampler import SampleRow
from kvferry.engine.state_rows import ROWS, StateRowPool
from kvferry.engine.step_slices import Slice
from kvferry.engine.window_blocks import WindowBlocks
from kvferry.protocol.errors import ConfigError, reason
from kvferry.protocol.layout import blocks_for
from kvferry.protocol.lease import Rates
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate
from kvferry.worker.step_time_fit import StepTimeFit
from kvferry.worker.warmup import first_steps

log = logging.getLogger("kvferry.worker")

WEIGHT = 0.1
"""Weight of a new observation in the moving averages."""
FIRST_TOKENS, ENOUGH_S = 64, 0.1
"""Warm-up: tokens of the first chunk, and duration in seconds beyond which chunks no longer double.

Longer chunks would show nothing new."""
MIN_TURNS, FULL_TURNS = 3, 2
"""Warm-up: minimum number of measured turns, and number of turns with a full step."""
ITL_S = 10.0
"""Time constant of the average duration of steps with streams, in seconds."""
ADJUSTED = SamplingParams(temperature=0.0, repetition_penalty=1.1, logit_bias=((0, 1.0),))
"""Sampling parameters that add to logits and subtract from them, for the warm-up of sampling."""
MIN_PREFILL_TOKENS = 32
"""Minimum number of prompt tokens of a step from which prefill speed is learned."""


class RateMeter:
    """Learned rates of the node: prefill speed, step time and ship speed.

    itl_s: recent inter-token latency in seconds. alone_s: inter-token latency of a stream that runs alone."""

    def __init__(self, seed: Rates) -> None:
        self._prefill = seed.prefill_tokens_per_s
        self._step = seed.step_s
        self._ship = seed.ship_bytes_per_s
        self._media, self._encodes = seed.media_tokens_per_s, False
        self.itl_s = self.alone_s = seed.step_s
        self._streams = StepTimeFit(seed.step_s)

    @property
    def rates(self) -> Rates:
        """Return the current rates."""
        alone_s, stream_s = self._streams.alone_s, self._streams.stream_s
        own = self._prefill, self._step, self._ship
        return Rates(*own, alone_s=alone_s, stream_s=stream_s, media_tokens_per_s=self._media)

    def stepped(self, step: Stepped) -> None:
        """Learn from an engine step.

        A pure prefill step shows tokens per second, a pure decode step seconds per step."""
        if step.seconds <= 0:
            return
        if step.decode_tokens:
            self.itl_s += (1 - math.exp(-step.seconds / ITL_S)) * (step.seconds - self.itl_s)
            streams = step.decode_tokens - step.accepted
            token_s = step.seconds * streams / step.decode_tokens
            self._streams.observe(streams, token_s, pure=not step.prefill_tokens)
        if not step.decode_tokens and step.prefill_tokens >= MIN_PREFILL_TOKENS:
            self._prefill += WEIGHT * (step.prefill_tokens / step.seconds - self._prefill)
        elif not step.prefill_tokens:
            self._step += WEIGHT * (step.seconds - self._step)

    def shipped(self, num_bytes: int, seconds: float) -> None:
        """Learn from a ship of `num_bytes` that had sends in flight for `seconds`."""
        if seconds > 0 and num_bytes:
            self._ship += WEIGHT * (num_bytes / seconds - self._ship)

    def encoded(self, tokens: int, seconds: float) -> None:
        """Learn from an image or audio of `tokens` tokens that was encoded in `seconds`. On the encoder's thread.

        The first one does not count: its calls allocate and compile."""
        if self._encodes and seconds > 0:
            self._media += (WEIGHT if self._media else 1.0) * (tokens / seconds - self._media)
        self._encodes = True


def warm_up(engine: Engine) -> Rates:
    """Measure rates with prefill chunks and decode steps on the unused pool.

    First calls compile kernels and allocate workspaces, so that requests do not wait for it; the first turn does not
    count. Chunks then double until they fill a step or take ENOUGH_S, and that size repeats. The fastest turn counts,
    because other processes that start on the machine can only slow a turn down. Raises ConfigError when the model
    cannot compute a step."""
    bs = engine.config.block_size
    room = min(engine.config.max_model_len, engine.pool.num_blocks * bs) - 1
    longest = max(1, min(engine.config.limits.max_num_batched_tokens, room - 1))
    job = Job("warm-up", 0, (1,) * (longest + 1), longest, Generate(SamplingParams(temperature=0.0)), "")
    request = Request(job, b"", bs)
    request.block_ids = list(range(blocks_for(longest + 1, bs)))
    if (groups := engine.runner.model.info.groups) is not None:
        ids = [block_id for block_id in request.block_ids for _ in range(groups.count)]
        request.windows = WindowBlocks(0, groups.count, ids)
    elif engine.states is not None:
        request.state_rows = StateRowPool(ROWS).take()

    def run(start: int, count: int) -> float:
        began = time.monotonic()
        engine.runner.run([Slice(request, start, count)])
        return time.monotonic() - began

    length = min(FIRST_TOKENS, longest)
    if engine.draft_model is not None:
        warm_draft(engine, request, longest)
    try:
        if engine.runner.model.device.type == "cuda":
            compile_all(engine, request, longest)
        run(0, length)
        run(length, 1)
    except Exception as error:
        log.debug("the first step failed", exc_info=True)
        raise _useless(engine.runner, error, "model") from error
    rate, step_s, turns, full = 0.0, math.inf, 0, 0
    while full < FULL_TURNS:
        seconds = run(0, length)
        rate, step_s = max(rate, length / seconds), min(step_s, run(length, 1))
        turns += 1
        full += length == longest
        if seconds <= ENOUGH_S:
            length = min(2 * length, longest)
        elif turns >= MIN_TURNS:
            break
    return Rates(prefill_tokens_per_s=rate, step_s=step_s)


def warm_draft(engine: Engine, request: Request, longest: int) -> None:
    """Run the first steps of the draft model, whose pool has as many blocks as the target model's.

    Raises ConfigError when it cannot compute one."""
    assert engine.draft_model is not None
    runner, rows = engine.draft_model.runner, request.state_rows
    request.state_rows = None if runner.states is None else StateRowPool(ROWS).take()
    longest = min(longest, runner.model.info.max_model_len - 1)
    try:
        if runner.model.device.type == "cuda":
            for slices in first_steps(request, request, longest, engine.config.limits.max_num_seqs):
                runner.run(slices)
        runner.run([Slice(request, 0, min(FIRST_TOKENS, longest))])
        for _ in range(2):
            runner.run([Slice(request, longest, 1)])
    except Exception as error:
        log.debug("the first step of the draft model failed", exc_info=True)
        raise _useless(runner, error, "speculative_model") from error
    request.state_rows = rows


def _useless(runner: StepRunner, error: Exception, param: str) -> ConfigError:
    name = runner.model.info.name
    return ConfigError(f"{name} cannot be run: its first step failed with {reason(error)}", param=param)


def compile_all(engine: Engine, request: Request, longest: int) -> None:
    """Run one step of every kind, so that GPU kernels compile and graphs are captured.

    request: has `longest` + 1 tokens and blocks for them."""
    limits = engine.config.limits
    rows = limits.max_num_seqs * (1 + engine.config.drafts)
    for slices in first_steps(request, request, longest, rows):
        engine.runner.run(slices)
    for params in (request.job.params, ADJUSTED):
        request.sample_row = SampleRow(params, request.token_ids, request.job.prompt_len)
        engine.runner.run([Slice(request, longest, 1)])  # samples a token
    request.sample_row = None
