"""Result of one check of `kvferry doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the report. `remedy`: how to fix it; empty if the level is ok."""

    level: Level
    name: str
    found: str
    remedy: str = ""
