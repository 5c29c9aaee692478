"""FAMILIES: all model families of our own decoder by model_type, joined from the dense, MoE and hybrid tables."""

from __future__ import annotations

from kvferry.engine.models.dense_families import DENSE
from kvferry.engine.models.hybrid_families import HYBRIDS
from kvferry.engine.models.moe_families import MIXTURES

FAMILIES = DENSE | MIXTURES | HYBRIDS
