"""Lookahead: asynchronous scheduling, which launches the next decode step while one runs on the device.

A device that computes asynchronously then never waits for the host between two steps.

A step is launched ahead if its work is certain: the streams of the running step, one token further, all plain (no host
work after a token), and nothing else to schedule. The tokens that it starts with stay on the device, which also counts
them for penalties. A stream that turns out to have ended leaves one superfluous row, which is dropped.

While a step is in flight, nothing is scheduled, admitted or preempted, and no command is taken: the step is collected
first. Blocks of ended streams thus go only to a later step, which the device computes in order. The link, a copy or a
canary check gets blocks only while no step is in flight."""

from __future__ import annotations

import logging

from kvferry.engine import fault_isolation
from kvferry.engine.fault_isolation import Drawn
from kvferry.engine.request import Request
from kvferry.engine.request_table import share
from kvferry.engine.runner import StepRunner
from kvferry.engine.scheduler import Scheduler
from kvferry.engine.speculation import Speculation
from kvferry.engine.step_slices import Slice
from kvferry.engine.suspended_steps import Batch, SuspendedStep

log = logging.getLogger("kvferry.engine")


class Lookahead:
    """Asynchronous steps of one engine; at most one step is in flight between two others.

    longest: length at which a sequence ends, in tokens."""

    def __init__(
        self, scheduler: Scheduler, runner: StepRunner, suspended: SuspendedStep, speculation: Speculation, longest: int
    ) -> None:
        self._scheduler, self._runner, self._suspended = scheduler, runner, suspended
        self._speculation, self._longest = speculation, longest
        self._batch: Batch | None = None
        self._whole = True

    def __bool__(self) -> bool:
        """Return whether a step is in flight."""
        return self._batch is not None

    def take(self) -> Batch | None:
        """Return the step in flight, without ended requests; the caller runs it next."""
        self.settle()
        batch, self._batch = self._batch, None
        self._whole = self._whole or batch is None
        return batch

    def run(self, batch: Batch, *, further: bool) -> list[Drawn] | None:
        """Run a batch like `SuspendedStep.run`: collect the step in flight, after launching the next one.

        further: whether to launch it. If launching or collecting raises, compute the step again from the start."""
        try:
            if further:
                self._launch(batch)
            if batch.flight is not None:
                return list(batch.flight.collect())
        except Exception as error:
            fault_isolation.require_device(self._runner.model.device, error)
            log.exception("a step that was launched ahead failed")
            self._batch = None
        drawn = self._suspended.run(self._runner, batch)
        return None if drawn is None else list(drawn)

    def settle(self) -> None:
        """Wait for the step in flight if all of its streams have ended. Called after each step."""
        batch = self._batch
        if batch is None:
            return
        launched = len(batch.slices)
        if batch.left():
            self._whole = self._whole and len(batch.slices) == launched
            return
        self._batch = None
        try:
            assert batch.flight is not None
            batch.flight.collect()
        except Exception as error:
            fault_isolation.require_device(self._runner.model.device, error)

    def _launch(self, batch: Batch) -> None:
        """Launch the batch if it is not in flight, and the step after it; nothing if that one must not be launched."""
        launch = self._runner.launch
        if launch is None or self._runner.states is not None:
            return
        going = self._going(batch)
        if not going:
            return
        if batch.flight is None:
            batch.flight = launch(batch.slices, None)
        slices = [Slice(batch.slices[i].request, batch.slices[i].start + 1, 1) for i in going]
        flight = launch(slices, batch.flight.of(going))
        self._batch, self._whole = Batch(slices, flight=flight), True
        share(self._scheduler.request_table, len(slices))

    def _going(self, batch: Batch) -> list[int]:
        """Return which slices surely continue unless a token ends them; none if anything else comes first."""
        request_table = self._scheduler.request_table
        all_run = len(batch.slices) == len(request_table.running) and not (self._suspended or self._suspended.called())
        if not all_run or self._speculation or not all(map(_plain, batch.slices)):
            return []
        going = [i for i, part in enumerate(batch.slices) if self._continues(part.request)]
        if request_table.waiting:
            # Its head was refused, and no request has left since or is about to.
            unchanged = self._whole and len(going) == len(batch.slices)
            if not unchanged or request_table.waiting[0] is not self._scheduler.refused:
                return []
        return going if all(self._grow(batch.slices[i].request) for i in going) else []

    def _continues(self, request: Request) -> bool:
        room = request.output_len + 1 < request.job.params.max_tokens
        return room and len(request.token_ids) + 1 < self._longest

    def _grow(self, request: Request) -> bool:
        """Allocate a block for the K/V of the token that is being drawn, if one is free."""
        return self._scheduler.blocks.extend(request, len(request.token_ids) + 1)


def _plain(part: Slice) -> bool:
    """Return whether the token after the next one can be drawn before the host knows the next one."""
    request = part.request
    if not part.streams or not part.draws or request.transfer is not None or request.prefill_only:
        return False
    params = request.job.params
    return request.job.grammar is None and params.logprobs is None and not params.bad_words
