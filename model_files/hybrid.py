"""Layers of a hybrid model, from its config.json: which have attention, a recurrent mixer and an MLP, and sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvferry.model_files.config_fields import LAYER_FIELDS, check_layers, whole, whole_or
from kvferry.model_files.recurrent import MixerSizes, Shapes
from kvferry.model_files.recurrent_fields import SIZES
from kvferry.protocol.errors import ConfigError

ATTENTION, RECURRENT, BOTH, MLP = "attention", "recurrent", "both", "mlp"
"""Kinds of layers. Those of Nemotron-H have a single part; in other families each has an MLP, too."""
_SPELLINGS = {
    "attention": ATTENTION,
    "full_attention": ATTENTION,
    "recurrent": RECURRENT,
    "conv": RECURRENT,
    "linear_attention": RECURRENT,
    "mamba": RECURRENT,
    "hybrid": BOTH,
    "mlp": MLP,
    "moe": MLP,
}


@dataclass(frozen=True, slots=True)
class HybridLayers:
    """Parts of each layer, and the sizes of the recurrent ones. single: a layer has no MLP beside its mixer."""

    kinds: tuple[str, ...]
    sizes: MixerSizes
    single: bool = False

    def attends(self, index: int) -> bool:
        """Return whether the layer has attention, whose K/V are cached."""
        return self.kinds[index] in (ATTENTION, BOTH)

    def recurs(self, index: int) -> bool:
        """Return whether the layer has a recurrent mixer, alone or beside attention."""
        return self.kinds[index] in (RECURRENT, BOTH)

    def has_mlp(self, index: int) -> bool:
        """Return whether the layer has an MLP or experts."""
        return self.kinds[index] == MLP or not self.single

    @property
    def attending(self) -> int:
        """Number of layers with attention."""
        return sum(map(self.attends, range(len(self.kinds))))

    @property
    def recurring(self) -> int:
        """Number of layers with a recurrent mixer."""
        return sum(map(self.recurs, range(len(self.kinds))))

    @property
    def states(self) -> Shapes:
        """Shapes of a sequence's state over all layers, in their order."""
        return self.sizes.states * self.recurring


def hybrid_layers(config: dict[str, Any]) -> HybridLayers | None:
    """Return the layers of a hybrid model's config; None for models without recurrent layers.

    Raises ConfigError, or KeyError if a field is missing."""
    kind = config.get("model_type")
    if kind not in SIZES:
        return None
    layers = layer_count(config)
    found = _KINDS.get(kind, _listed)(config, layers)
    if len(found) < layers:
        raise ConfigError(f"config.json: layer_types has {len(found)} entries for {layers} layers", param="model")
    if kind not in SINGLE and set(found[:layers]) == {ATTENTION}:
        return None
    hybrid = HybridLayers(found[:layers], SIZES[kind](config), single=kind in SINGLE)
    if not hybrid.attending:
        raise ConfigError("config.json: no layer has attention; at least one is needed", param="model")
    return hybrid


def layer_count(config: dict[str, Any]) -> int:
    """Return the number of layers. Raises ConfigError, or KeyError without a field."""
    name = next((each for each in LAYER_FIELDS if each in config), LAYER_FIELDS[0])
    check_layers(config.get(name))
    return whole(config, name)


def _listed(config: dict[str, Any], layers: int) -> tuple[str, ...]:
    """Return the kinds that a config lists, or its every n-th layer with attention."""
    given = config.get("layer_types") or config.get("layers_block_type")
    if given is None:
        every = whole_or(config, "full_attention_interval", 4)
        return tuple(RECURRENT if (index + 1) % every else ATTENTION for index in range(layers))
    return _spelled(given)


def _spelled(given: Any) -> tuple[str, ...]:
    for index, each in enumerate(listed("layer_types", given)):
        if not isinstance(each, str) or each not in _SPELLINGS:
            raise ConfigError(
                f"config.json: layer_types[{index}] is {each!r:.40}, not one of {', '.join(_SPELLINGS)}", param="model"
            )
    return tuple(_SPELLINGS[each] for each in given)


def listed(name: str, given: Any) -> list[Any]:
    """Return a field's value, which must be a list. Raises ConfigError."""
    if not isinstance(given, list | tuple):
        raise ConfigError(f"config.json: {name} must be a list, got {given!r:.40}", param="model")
    return list(given)


def _short_conv(config: dict[str, Any], layers: int) -> tuple[str, ...]:
    if config.get("layer_types"):
        return _spelled(config["layer_types"])
    if config.get("full_attn_idxs") is None:
        return (ATTENTION,) * layers
    attending = listed("full_attn_idxs", config["full_attn_idxs"])
    return tuple(ATTENTION if index in attending else RECURRENT for index in range(layers))


def _bamba(config: dict[str, Any], layers: int) -> tuple[str, ...]:
    attending = listed("attn_layer_indices", config.get("attn_layer_indices") or ())
    return tuple(ATTENTION if index in attending else RECURRENT for index in range(layers))


def _falcon_h1(config: dict[str, Any], layers: int) -> tuple[str, ...]:
    return (BOTH,) * layers


def _granite(config: dict[str, Any], layers: int) -> tuple[str, ...]:
    return _spelled(config.get("layer_types") or config.get("layers_block_type") or [RECURRENT] * layers)


def _jamba(config: dict[str, Any], layers: int) -> tuple[str, ...]:
    if config.get("layer_types"):
        return _spelled(config["layer_types"])
    every, first = whole_or(config, "attn_layer_period", 8), config.get("attn_layer_offset", 4)
    return tuple(ATTENTION if index % every == first else RECURRENT for index in range(layers))


def _minimax(config: dict[str, Any], layers: int) -> tuple[str, ...]:
    given = config.get("layer_types")
    return _spelled(given) if given else tuple(RECURRENT if index % 2 else ATTENTION for index in range(layers))


_KINDS: dict[str, Callable[[dict[str, Any], int], tuple[str, ...]]] = {
    "lfm2": _short_conv,
    "lfm2_moe": _short_conv,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granite,
    "jamba": _jamba,
    "minimax": _minimax,
}
"""Readers of a family's kinds of layers, where `_listed` does not serve."""
GATED = frozenset(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"))
"""Families whose attention has a gate as wide as its queries."""
SINGLE = frozenset(("nemotron_h",))
"""Families whose layers have a single part each."""
