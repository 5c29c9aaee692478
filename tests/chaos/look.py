"""What of a run is worth looking into: its longest pauses and its errors, each with the faults before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.chaos.load import Asked, pauses
from tests.chaos.report import FELT_S, Run
from tests.chaos.tracing import timelines

TRACED = 40
"""How many of the longest pauses are traced."""


def to_look_into(run: Run, count: int = 8) -> dict[str, list[dict[str, Any]]]:
    """The longest pauses and the errors, each with the faults that began in the 12 s before its end."""
    errors = [asked for asked in run.stormy.asked if asked.error]
    return {
        "pauses": _with_faults(run, _longest_paused(run, count), lambda a: a.pause),
        "errors": _with_faults(run, errors[:30], lambda a: (a.began, a.ended - a.began)),
    }


def traced_pauses(run: Run, home: Path) -> str:
    """The longest pauses, each with the faults before it and what its request met in all processes, for people."""
    paused = _longest_paused(run, TRACED)
    traced = [(asked.trace, *asked.pause) for asked in paused if asked.pause]
    parts = []
    for told, around in zip(_with_faults(run, paused, lambda a: a.pause), timelines(home, traced), strict=True):
        head = f"{told['seconds']} s at {told['at_s']} s, request {told['request']}, {told['route']} {told['error']}"
        parts.append("\n".join([head, *(f"  fault {fault}" for fault in told["faults"]), *around]))
    return "\n\n".join(parts) + "\n"


def _longest_paused(run: Run, count: int) -> list[Asked]:
    """Those in which the clients' own loop stood still are as long as without that, as in the table."""
    streamed = [asked for asked in run.stormy.asked if asked.pause]
    felt = dict(zip(map(id, streamed), pauses(streamed, run.late), strict=True))
    return sorted(streamed, key=lambda asked: -felt[id(asked)])[:count]


def _with_faults(
    run: Run, chosen: Sequence[Asked], when: Callable[[Asked], tuple[float, float]]
) -> list[dict[str, Any]]:
    return [
        {
            "request": asked.which,
            "at_s": round(when(asked)[0] - run.began, 2),
            "seconds": round(when(asked)[1], 2),
            "route": asked.route,
            "error": asked.error,
            "faults": [
                f"{done.at - run.began:.1f} {done.fault.kind} {done.fault.target} "
                f"{done.fault.seconds} {done.fault.number}"
                for done in run.done
                if when(asked)[0] - FELT_S < done.at < sum(when(asked))
            ],
        }
        for asked in chosen
    ]
