"""Falcon-H1's multipliers of dense layers, parsed from its config and folded into the weights as they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvferry.engine.models.weights import Weights
from kvferry.kernels.decoder_spec import Stored
from kvferry.model_files.config_fields import number_or
from kvferry.model_files.recurrent import StateSpaceSizes
from kvferry.protocol.errors import ConfigError

_SECTIONS = 5
"""Parts of a mixer's in_proj: gate, inputs of heads, input vectors, output vectors and time steps."""


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Factors of a layer's dense layers. by_layer: name of a dense layer, factor of its weight, factor of its bias.

    sections: of the outputs of a mixer's in_proj, one for each part; whole: of all inputs of that layer."""

    by_layer: tuple[tuple[str, float, float], ...]
    sections: tuple[float, ...]
    whole: float

    def of(self, target: str) -> float:
        """Return the factor of a dense layer's weight: 1 if it has none."""
        return next((weight for name, weight, _ in self.by_layer if name == target), 1.0)


def parse_multipliers(config: dict[str, Any]) -> Multipliers | None:
    """Return the multipliers of a config.json; None for families without them. Raises ConfigError."""
    if config["model_type"] != "falcon_h1":
        return None
    into, out, key = (
        number_or(config, name, 1.0)
        for name in ("attention_in_multiplier", "attention_out_multiplier", "key_multiplier")
    )
    gate, down = _several(config, "mlp_multipliers", 2)
    ssm_out = number_or(config, "ssm_out_multiplier", 1.0)
    return Multipliers(
        by_layer=(
            ("q_proj", into, 1.0),
            ("k_proj", into * key, key),
            ("v_proj", into, 1.0),
            ("o_proj", out, out),
            ("gate_proj", gate, gate),
            ("down_proj", down, down),
            ("out_proj", ssm_out, ssm_out),
        ),
        sections=_several(config, "ssm_multipliers", _SECTIONS),
        whole=number_or(config, "ssm_in_multiplier", 1.0),
    )


def _several(config: dict[str, Any], name: str, count: int) -> tuple[float, ...]:
    given = config.get(name) or [1.0] * count
    if not isinstance(given, list | tuple) or len(given) != count:
        raise ConfigError(f"config.json: {name} must have {count} numbers, got {given!r:.80}", param="model")
    return tuple(number_or({name: each}, name, 1.0) for each in given)


class MultipliedWeights:
    """Implements `engine.models.weights.Weights`: wraps other weights and applies the multipliers."""

    def __init__(self, weights: Weights, multipliers: Multipliers, sizes: StateSpaceSizes) -> None:
        self._weights, self._multipliers, self._sizes = weights, multipliers, sizes

    def read(self, name: str, out: torch.Tensor) -> None:
        self._weights.read(name, out)
        if (factor := self._factor(name)) is not None:
            out.mul_(factor.view(-1, *(1,) * (out.dim() - 1)).to(out.device) if factor.dim() else factor)

    def stored(self, name: str, shape: tuple[int, int]) -> Stored | None:
        return self._weights.stored(name, shape) if self._factor(name) is None else None

    def _factor(self, name: str) -> torch.Tensor | None:
        """Return the factor of a tensor, or one for each of its rows; None: it has none."""
        own = self._multipliers
        layer, _, kind = name.rpartition(".")
        target = layer.rpartition(".")[2]
        if target == "in_proj":
            sizes, vectors = self._sizes, self._sizes.groups * self._sizes.state
            counts = torch.tensor([sizes.inner, sizes.inner, vectors, vectors, sizes.heads])
            of_rows = torch.tensor(own.sections).repeat_interleave(counts)
            return of_rows if kind == "bias" else of_rows * own.whole
        found = next(((weight, bias) for each, weight, bias in own.by_layer if each == target), (1.0, 1.0))
        factor = found[kind == "bias"]
        return None if factor == 1.0 else torch.tensor(factor)
