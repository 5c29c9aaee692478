"""Maps a request's reasoning options to the variables with which its chat template switches reasoning."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

SWITCHES = ("enable_thinking", "thinking")
"""Variables that are true or false."""
EFFORT = "reasoning_effort"
EFFORTS = ("none", "no_think", "minimal", "low", "medium", "high", "xhigh", "max")
"""Efforts that clients and templates name, from the least to the most."""
_MODE = {True: "enabled", False: "disabled"}


def variables(given: Mapping[str, Any], known: Collection[str], efforts: Collection[str]) -> dict[str, Any]:
    """Return a request's variables, and the same options in the variables that the template reads.

    known    variables that the template reads
    efforts  efforts that it accepts; any other becomes the nearest of them. Empty: it accepts any"""
    found = dict(given)
    switch = _switch(given)
    if switch is not None:
        missing = {name: switch for name in SWITCHES if name in known and name not in given}
        if not missing and not any(name in known for name in SWITCHES):
            missing = _others(known, is_on=switch)
        found = {**missing, **found}
    effort = given.get(EFFORT)
    if efforts and effort in EFFORTS and effort not in efforts:
        found[EFFORT] = _nearest(effort, efforts)
    return found


def _switch(given: Mapping[str, Any]) -> bool | None:
    """Return whether the request wants reasoning; None if it does not say."""
    for name in SWITCHES:
        if isinstance(given.get(name), bool):
            return bool(given[name])
    effort = given.get(EFFORT)
    if effort not in EFFORTS:
        return None
    return effort not in ("none", "no_think")


def _others(known: Collection[str], *, is_on: bool) -> dict[str, Any]:
    """Return variables of templates without a switch: MiniMax's mode, and Seed-OSS's budget, which is 0 for none."""
    mode = {"thinking_mode": _MODE[is_on]} if "thinking_mode" in known else {}
    budget = {"thinking_budget": 0} if "thinking_budget" in known and not is_on else {}
    return {**mode, **budget}


def _nearest(effort: str, efforts: Collection[str]) -> str:
    place = EFFORTS.index(effort)
    return min((each for each in EFFORTS if each in efforts), key=lambda each: abs(EFFORTS.index(each) - place))
