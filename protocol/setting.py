"""Function that defines one field of a settings class: default, flag help, choices and bounds."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def setting(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    hidden: bool = False,
    former: str = "",
    short: str = "",
) -> Any:
    """Define a field of a settings class, with what the command line needs to offer and check it.

    A tuple is a flag that may be repeated, and a variable with spaces between its values.

    choices       the allowed words, if only certain words are allowed
    least, most   inclusive bounds of a number
    hidden        set by the supervisor, not by people: help and README omit it
    former        an earlier name, which still works
    short         a second flag of few letters"""
    told = {"help": help, "choices": choices, "least": least, "most": most, "hidden": hidden}
    return field(default=default, metadata={**told, "former": former, "short": short})
