"""Table of model families by their model_type."""

from __future__ import annotations

from kvferry.engine.models.dense_families import DENSE
from kvferry.engine.models.hybrid_families import HYBRIDS
from kvferry.engine.models.moe_families import MIXTURES

FAMILIES = DENSE | MIXTURES | HYBRIDS
