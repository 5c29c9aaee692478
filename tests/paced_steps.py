"""Engine steps that last at least as long as on a device that needs no core of this machine: they sleep.

What waits then waits for the device, as in production, and not for the test's own load. Streams last as long on any
machine, and a tiny model takes the place of a large one where a test needs only the time that its tokens take."""

from __future__ import annotations

import time
from typing import Any, TypedDict


class Pace(TypedDict):
    """Seconds of a step, and of each prompt token in it."""

    step_s: float
    token_s: float


PROMPTS_MATTER: Pace = {"step_s": 0.002, "token_s": 0.0002}
"""Pace at which prompts take longer than handing them over, on any machine, so that they go to prefill nodes."""


def pace_steps(step_s: float, token_s: float = 0.0) -> None:
    """Let each step of this process's engine last so long at least, and longer by `token_s` for each prompt token."""
    if not step_s + token_s:
        return
    from kvferry.engine.runner import Runner

    run = Runner.run

    def paced(self: Any, slices: Any, *rest: Any) -> Any:
        began = time.monotonic()
        made = run(self, slices, *rest)
        length = step_s + token_s * sum(each.count for each in slices if not each.decodes)
        time.sleep(max(0.0, began + length - time.monotonic()))
        return made

    Runner.run = paced  # type: ignore[assignment, method-assign]
