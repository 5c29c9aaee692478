"""Fault isolation: bisects a step that raises until only the offending requests fail."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvferry.engine.models.base import ForwardAbandoned, KeepGoing, SuspendedPass
from kvferry.engine.request import Request
from kvferry.engine.runner import StepRunner
from kvferry.engine.sample_rows import Outcome
from kvferry.engine.step_slices import Slice
from kvferry.kernels.decoder_step import always
from kvferry.protocol.errors import KvferryError, StepFailed, reason

log = logging.getLogger("kvferry.engine")


class DeviceLost(Exception):
    """The device does not compute any more, so the node must end."""


@dataclass(frozen=True, slots=True)
class StepFault:
    """Result of a slice that raises when computed alone: its exception in place of a token."""

    error: KvferryError


Drawn = Outcome | StepFault


def run(
    runner: StepRunner, slices: Sequence[Slice], keep_going: KeepGoing, halfway: SuspendedPass | None = None
) -> Sequence[Drawn]:
    """Call `StepRunner.run`; if it raises, bisect: each slice gets a token, or the error that it raises alone.

    One bad slice of n costs the work of at most log n steps. Raises ForwardAbandoned if the step is not to continue,
    and DeviceLost once even a sum of two numbers fails."""
    drawn = _try(runner, slices, keep_going, halfway)
    if not isinstance(drawn, Exception):
        return drawn
    log.error("a step of %d requests failed", len(slices), exc_info=drawn)
    return _halves(runner, slices)


def _halves(runner: StepRunner, slices: Sequence[Slice]) -> list[Drawn]:
    """Run slices that raised together in two halves.

    A single slice is tried once more: memory may have been short for a moment."""
    middle = len(slices) // 2
    found: list[Drawn] = []
    for half in filter(None, (slices[:middle], slices[middle:])):
        drawn = _try(runner, half)
        if not isinstance(drawn, Exception):
            found += drawn
        elif len(half) > 1:
            found += _halves(runner, half)
        else:
            found.append(StepFault(_client_error(half[0], drawn)))
    return found


def _try(
    runner: StepRunner, slices: Sequence[Slice], keep_going: KeepGoing = always, halfway: SuspendedPass | None = None
) -> Sequence[Outcome] | Exception:
    """Run the slices; a raised exception is returned and leaves no trace in the requests."""
    kept = _kept(slices)
    try:
        return runner.run(slices, keep_going, halfway)
    except (ForwardAbandoned, DeviceLost):
        raise
    except Exception as error:
        require_device(runner.model.device, error)
        for request, pooled, scored in kept:
            request.pooled = pooled
            del request.prompt_logprobs[scored:]
        return error


def _client_error(part: Slice, error: Exception) -> KvferryError:
    if isinstance(error, KvferryError):
        return error
    log.error("%s fails even alone in a step: %s", part.request.key, reason(error))
    return StepFailed(f"the node cannot compute this request: {reason(error)}")


def require_device(device: torch.device, error: Exception) -> None:
    """Raise DeviceLost if the device fails at a trivial sum: every later computation would fail, too.

    On an asynchronous device this waits for all queued work."""
    try:
        works = torch.ones(2, device=device).sum().item() == 2
    except Exception as lost:
        raise DeviceLost(f"the device {device} is lost: {reason(lost)}") from error
    if not works:
        raise DeviceLost(f"the device {device} is lost: it computes wrong sums") from error


def _kept(slices: Sequence[Slice]) -> list[tuple[Request, torch.Tensor | None, int]]:
    """Return the state of requests that an incomplete run changes; nothing for streams, which make up most steps."""
    if slices[-1].streams:
        return []
    return [(part.request, part.request.pooled, len(part.request.prompt_logprobs)) for part in slices]
