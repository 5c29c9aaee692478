"""Capabilities of an operations backend: which weight and cache formats it supports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capabilities:
    """codes: those of GGUF's block formats and of quantised checkpoints run as they are stored, and dense layers that
    are quantised to int8 as they are loaded. unit: K and V are kept in 8 bits where head dims are multiples of it."""

    codes: bool = False
    unit: int = 1
