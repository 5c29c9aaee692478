"""Capabilities of an operations backend: which formats of weights and of the KV cache it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Formats that an operations backend runs.

    codes: GGUF's block formats and quantised checkpoints run as stored, and dense layers may be quantised to int8 while
    they are loaded. unit: K and V are kept in 8 bits if head dims are multiples of it."""

    codes: bool = False
    unit: int = 1
