"""Function that defines one field of a settings class: default, flag help, choices and bounds."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def setting(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    min: float | None = None,
    max: float | None = None,
    hidden: bool = False,
    former: str = "",
    short: str = "",
) -> Any:
    """Define a field of a settings class, with what the command line needs to offer and check it.

    A tuple is a flag that may be repeated, and a variable with spaces between its values.

    choices       the allowed words, if only certain words are allowed
    min, max      inclusive bounds of a number
    hidden        set by the supervisor, not by people: help and README omit it
    former        an earlier name, which still works
    short         a second flag of few letters"""
    bounds = {"min": min, "max": max}
    more = {"choices": choices, "hidden": hidden, "former": former, "short": short}
    return field(default=default, metadata={"help": help, **bounds, **more})
