"""Layer shapes of Gemma 3n and Gemma 4, whose layers differ in heads and width and may share K/V, by config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvferry.model_files.config_fields import check_layers, whole, whole_or
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.layout import CachedLayer

SHAPED = frozenset(("gemma3n_text", "gemma4_text"))
"""Values of model_type whose layers have shapes of their own."""
_SLIDING, _FULL = "sliding_attention", "full_attention"
_GLOBAL_DIM = 512
"""Gemma 4's head dim of layers without a window, unless the config says."""


@dataclass(frozen=True, slots=True)
class LayerShapes:
    """Shapes of a model's layers; each tuple has one entry per layer.

    sliding: it has a window. head_dims, kv_heads: of its attention. widths: of its MLP. sources: the layer whose K/V it
    reads, which is its own index unless it shares. own_values: V has a projection; otherwise it is K's. input_size,
    input_words: width of each layer's input embedding, 0 for none, and rows of its table."""

    sliding: tuple[bool, ...]
    head_dims: tuple[int, ...]
    kv_heads: tuple[int, ...]
    widths: tuple[int, ...]
    sources: tuple[int, ...]
    own_values: tuple[bool, ...]
    input_size: int
    input_words: int

    @property
    def cached(self) -> tuple[CachedLayer, ...]:
        """Return the cache shapes of the layers that write K/V."""
        return tuple(CachedLayer(self.kv_heads[index], self.head_dims[index]) for index in self._writing)

    @property
    def sharing(self) -> int:
        """Return the index of the first layer that shares K/V; it and all after it write none."""
        return next((index for index, source in enumerate(self.sources) if source != index), len(self.sources))

    def shares(self, index: int) -> bool:
        """Return whether the layer reads another layer's K/V."""
        return self.sources[index] != index

    def place(self, index: int) -> int:
        """Return the index of the K/V that a layer reads, among those that are written."""
        return self._writing.index(self.sources[index])

    def rotated(self, slides: bool, otherwise: int) -> int:
        """Return the head dim of layers with or without a window, which their rotation spans. Raises ConfigError."""
        dims = {dim for dim, own in zip(self.head_dims, self.sliding, strict=True) if own == slides}
        if len(dims) > 1:
            raise ConfigError(f"config.json: layers of one kind have head dims {sorted(dims)}", param="model")
        return dims.pop() if dims else otherwise

    def attention_weights(self, hidden: int, heads: int) -> int:
        """Return the number of weights of all layers' attention, for `heads` query heads."""
        of_queries = sum(2 * heads * dim for dim in self.head_dims)
        writing = ((self.kv_heads[i] * self.head_dims[i], 1 + self.own_values[i]) for i in self._writing)
        return hidden * (of_queries + sum(width * parts for width, parts in writing))

    @property
    def _writing(self) -> tuple[int, ...]:
        return tuple(index for index, source in enumerate(self.sources) if source == index)


def layer_shapes(config: dict[str, Any]) -> LayerShapes:
    """Return the shapes of a config.json of `SHAPED`. Raises ConfigError, or KeyError if a field is missing."""
    count, gemma4 = whole(config, "num_hidden_layers"), config["model_type"] == "gemma4_text"
    check_layers(count)
    sliding = _sliding(config, count, pattern=6 if gemma4 else 5)
    if gemma4:
        sliding = (*sliding[:-1], False)
    sources = _sources(config, sliding, 0 if gemma4 else 15)
    head_dim, kv_heads = whole_or(config, "head_dim", 256), whole(config, "num_key_value_heads")
    full = _of_full_layers(config) if gemma4 and not config.get("per_layer_config") else {}
    given = [{} if slides else full for slides in sliding]
    for index, own in (config.get("per_layer_config") or {}).items():
        if not str(index).isdecimal() or int(index) >= count or not isinstance(own, dict):
            raise ConfigError(f"config.json: per_layer_config has no layer {index!r:.80}", param="model")
        given[int(index)] = own
    widths = _widths(config, count)
    if config.get("use_double_wide_mlp"):
        widths = tuple(width << (sources[index] != index) for index, width in enumerate(widths))
    shapes = LayerShapes(
        sliding=sliding,
        head_dims=tuple(whole_or(own, "head_dim", head_dim) for own in given),
        kv_heads=tuple(whole_or(own, "num_key_value_heads", kv_heads) for own in given),
        widths=widths,
        sources=sources,
        own_values=tuple(slides or not config.get("attention_k_eq_v") for slides in sliding),
        input_size=config.get("hidden_size_per_layer_input", 256) or 0,
        input_words=whole_or(config, "vocab_size_per_layer_input", 262144),
    )
    for index, source in enumerate(sources):
        if (shapes.head_dims[index], shapes.kv_heads[index]) != (shapes.head_dims[source], shapes.kv_heads[source]):
            raise ConfigError(
                f"config.json: layer {index} shares K/V of another shape, layer {source}'s", param="model"
            )
    return shapes


def _of_full_layers(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Gemma 4's layers without a window. K/V heads count only where V is K's."""
    heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
    return {"head_dim": config.get("global_head_dim") or _GLOBAL_DIM, "num_key_value_heads": heads}


def _sliding(config: dict[str, Any], count: int, pattern: int) -> tuple[bool, ...]:
    types = config.get("layer_types")
    if types is None:
        return tuple((index + 1) % pattern != 0 for index in range(count))
    if not isinstance(types, list) or len(types) != count or not set(types) <= {_SLIDING, _FULL}:
        raise ConfigError(f"config.json: layer_types must name {count} of {_SLIDING} or {_FULL}", param="model")
    return tuple(kind == _SLIDING for kind in types)


def _sources(config: dict[str, Any], sliding: tuple[bool, ...], otherwise: int) -> tuple[int, ...]:
    """Return the layer whose K/V each reads: the last `num_kv_shared_layers` read the last of their kind before."""
    shared = config.get("num_kv_shared_layers", otherwise) or 0
    first = len(sliding) - shared if isinstance(shared, int) else 0
    last = {slides: index for index, slides in enumerate(sliding[: max(0, first)])}
    if not 1 <= first <= len(sliding) or not set(sliding[first:]) <= last.keys():
        raise ConfigError(
            f"config.json: num_kv_shared_layers is {shared!r:.80}, and the layers before those of {len(sliding)} are "
            "not of all kinds that share",
            param="model",
        )
    return tuple(index if index < first else last[slides] for index, slides in enumerate(sliding))


def _widths(config: dict[str, Any], count: int) -> tuple[int, ...]:
    given = config["intermediate_size"]
    if not isinstance(given, list):
        return (whole(config, "intermediate_size"),) * count
    if len(given) != count:
        raise ConfigError(f"config.json: intermediate_size has {len(given)} values for {count} layers", param="model")
    return tuple(whole({"intermediate_size": width}, "intermediate_size") for width in given)
