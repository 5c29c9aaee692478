"""Counts a model's weights, layers and K/V, for memory and speed estimates, from its config and file headers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kvferry.model_files.assumed_tensors import assumed_tensors, first_whole
from kvferry.model_files.config_fields import LAYER_FIELDS, whole_or
from kvferry.model_files.expert_fields import common_names, experts_in
from kvferry.model_files.gguf import GGUFFile, GGUFTensor, read_gguf
from kvferry.model_files.gguf_experts import expert_fields, layers_of, runs
from kvferry.model_files.gguf_gemma import shape_fields
from kvferry.model_files.gguf_hybrid import hybrid_header
from kvferry.model_files.gguf_latent import latent_fields
from kvferry.model_files.hybrid import GATED, hybrid_layers
from kvferry.model_files.latent import latent_sizes
from kvferry.model_files.layer_shapes import SHAPED, layer_shapes
from kvferry.model_files.multimodal import is_multimodal, is_text, media_taken, text_config
from kvferry.model_files.quantisation import quantisation
from kvferry.model_files.read_errors import naming
from kvferry.model_files.safetensors_headers import Tensor, safetensors_header, weights_of
from kvferry.model_files.source import ModelSource, read_facts, read_json, weight_files
from kvferry.model_files.supported_decoders import DECODERS, LATENT, gguf_family
from kvferry.model_files.supported_encoders import is_encoder
from kvferry.model_files.weight_counts import NOWHERE, WeightCount, counted
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.layout import DTYPE_BYTES, CachedLayer, KVLayout

_Sizes = TypeVar("_Sizes")
_HALVES, _MINIMA = 2 / 32, 2 / 32
_STORED = {
    2: 4 / 8 + _HALVES,
    3: 4 / 8 + _HALVES + _MINIMA,
    6: 5 / 8 + _HALVES,
    7: 5 / 8 + _HALVES + _MINIMA,
    8: 8 / 8 + _HALVES,
    10: 4 / 8 + 2 * (_HALVES + _MINIMA),
    11: 4 / 8 + 2 * _HALVES,
    12: 4 / 8 + _HALVES + _MINIMA,
    13: 5 / 8 + _HALVES + _MINIMA,
    14: 6 / 8 + 2 * _HALVES,
    20: 8 / 8 + _HALVES,
    23: 8 / 8 + _HALVES,
    39: 5 / 8 + _HALVES,
}
"""Bytes per weight, by ggml's number of the format, in the form in which the CPU kernels run it.

The forms are those of kernels/cpu/native/forms.h: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL,
IQ4_XS, and MXFP4 as Q5_0."""
_OF_32, _OF_16, _OF_256 = 1 / 32, 1 / 16, 2 / 256
_CODED = {
    2: 4 / 8 + _HALVES,
    3: 4 / 8 + _HALVES + _MINIMA,
    6: 6 / 8 + _HALVES,
    7: 6 / 8 + _HALVES + _MINIMA,
    8: 8 / 8 + _HALVES,
    10: 4 / 8 + 2 * (_OF_16 + _OF_256),
    11: 4 / 8 + _OF_16 + _OF_256,
    12: 4 / 8 + 2 * (_OF_32 + _OF_256),
    13: 6 / 8 + 2 * (_OF_32 + _OF_256),
    14: 6 / 8 + _OF_16 + _OF_256,
    20: 8 / 8 + _HALVES,
    23: 8 / 8 + _OF_32 + _OF_256,
    39: 4 / 8 + _HALVES,
}
"""Bytes per weight in the form in which a GPU runs it (kernels/gpu_weight_layout.py).

Scales and minima of larger blocks take eight bits, times 16 bits per block."""
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_ATTENTION_HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads")


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """Number of weights, layers and cached values of a model, from which its memory and work follow.

    dense: weights that multiply each token, in all layers. head: the vocabulary projection, empty if it is the
    embedding. max_model_len: in tokens. query_size: width of all query heads of one layer. cached: K and V are kept
    from step to step, as in all models but encoders. own: kvferry's decoder supports the family. experts: number in a
    layer that has them, else 0. shapes: of the layers that keep K and V, where layers have shapes of their own, else
    empty; then kv_heads and head_dim are those of the first. state_bytes: of a sequence's recurrent state. layers: with
    attention. tower: weights of the tower for images or audio, in the model's number format."""

    dense: WeightCount
    embedding: WeightCount
    head: WeightCount
    layers: int
    kv_heads: int
    head_dim: int
    query_size: int
    max_model_len: int
    cached: bool = True
    own: bool = False
    planes: int = 2
    experts: int = 0
    shapes: tuple[CachedLayer, ...] = ()
    state_bytes: int = 0
    tower: int = 0

    @property
    def mixed(self) -> bool:
        """Return whether a token meets some of the layers' weights alone, those of its experts."""
        return self.dense.active < self.dense.weights

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return self.dense.weights + self.embedding.weights + self.head.weights + self.tower

    def memory(self, itemsize: float, stored: str = NOWHERE) -> int:
        """Return the bytes of all weights."""
        text = sum(part.bytes(itemsize, stored) for part in (self.dense, self.embedding, self.head))
        return round(text + self.tower * itemsize)

    def step_bytes(self, itemsize: float, stored: str = NOWHERE) -> float:
        """Return the bytes of weights that a one-token step reads: nearly none of an embedding that is not the head."""
        head = self.head if self.head.weights else self.embedding
        share = self.dense.active / self.dense.weights if self.dense.weights else 1.0
        return share * self.dense.bytes(itemsize, stored) + head.bytes(itemsize, stored)

    def kv_bytes(self, dtype: str) -> int:
        """Return the bytes of one token's K and V in all layers; dtype as in `KVLayout`."""
        return self.cached * self.layout(dtype, 1).block_bytes

    def layout(self, dtype: str, block_size: int) -> KVLayout:
        """Return the layout of the model's KV blocks."""
        kept = len(self.shapes) or self.layers
        differing = self.shapes if len(set(self.shapes)) > 1 else ()
        return KVLayout(kept, self.kv_heads, self.head_dim, dtype, block_size, self.planes, differing)

    def prompt_work(self, length: int) -> float:
        """Return the operations per token of a prompt: layers, causal attention, and one row of the head.

        length: of the prompt, in tokens."""
        head = self.head.weights or self.embedding.weights
        return 2 * self.dense.active + 2 * self.layers * self.query_size * (length + 1) + 2 * head / length


def model_needs(source: ModelSource) -> ModelNeeds:
    """Return the needs of a model. Raises ConfigError if its files do not show them."""
    with naming(source.name):
        return gguf_needs(read_gguf(source.path)) if source.kind == "gguf" else _hf_needs(source)


def has_experts(source: ModelSource) -> bool:
    """Return whether the model's layers hold experts, by its config."""
    if source.kind == "gguf":
        return bool(read_gguf(source.path).get("expert_count"))
    return experts_in(common_names(text_config(read_json(source.path / "config.json")))) > 0


def config_needs(config: dict[str, Any], tensors: Iterable[Tensor] = (), max_model_len: int = 0) -> ModelNeeds:
    """Return the needs of a config.json.

    If no tensors are given, it assumes those of a gated decoder with this config. Raises ConfigError."""
    text = _read(common_names, text_config(config))
    hidden, layers, heads = (first_whole(text, *names) for names in (_HIDDEN, LAYER_FIELDS, _ATTENTION_HEADS))
    kv_heads = whole_or(text, "num_key_value_heads", 1 if text.get("multi_query") else heads)
    head_dim, planes = whole_or(text, "head_dim", hidden // heads), 2
    query_size, attention = heads * head_dim, 2 * (heads + kv_heads) * head_dim * hidden
    if text.get("model_type") in LATENT:
        sizes = _read(latent_sizes, text)
        kv_heads, head_dim, planes = 1, sizes.cached, 1
        query_size, attention = heads * (sizes.head_dim + sizes.value) // 2, sizes.weights(hidden, heads)
    shapes = _read(layer_shapes, text) if text.get("model_type") in SHAPED else None
    if shapes is not None:
        kv_heads, head_dim = shapes.kv_heads[0], shapes.head_dims[0]
        query_size, attention = (
            heads * sum(shapes.head_dims) // layers,
            shapes.attention_weights(hidden, heads) // layers,
        )
        text = text | {"intermediate_size": sum(shapes.widths) // layers}
    hybrid = _read(hybrid_layers, text)
    if text.get("model_type") in GATED:
        attention += query_size * hidden
    share = (text.get("num_experts_per_tok") or text.get("top_k_experts") or 1) / (experts_in(text) or 1)
    dense, embedding, head = counted(tensors or assumed_tensors(text, hidden, layers, attention, hybrid), share)
    cached, own = not is_encoder(config), text.get("model_type") in DECODERS
    state = 0
    if hybrid is not None:
        layers, state = hybrid.attending, DTYPE_BYTES["float32"] * sum(map(math.prod, hybrid.states))
    shape = layers, kv_heads, head_dim, query_size
    kept = shapes.cached if shapes is not None else ()
    return ModelNeeds(dense, embedding, head, *shape, max_model_len, cached, own, planes, experts_in(text), kept, state)


def _read(parse: Callable[[dict[str, Any]], _Sizes], text: dict[str, Any]) -> _Sizes:
    try:
        return parse(text)
    except KeyError as error:
        raise ConfigError(f"config.json lacks {error.args[0]}", param="model") from error


def _hf_needs(source: ModelSource) -> ModelNeeds:
    config = read_json(source.path / "config.json")
    files = [file for file in weight_files(source.path) if file.suffix == ".safetensors"]
    entries = {name: entry for file in files for name, entry in safetensors_header(file).items()}
    tensors = list(weights_of(entries, quantisation(config)))
    tensors = [tensor for tensor in tensors if _runs(tensor.name, config)]
    tower = 0
    if is_multimodal(config):
        loaded = tensors if media_taken(config) else ()
        tower = sum(math.prod(tensor.shape) for tensor in loaded if not is_text(tensor.name))
        tensors = [tensor for tensor in tensors if is_text(tensor.name)]
    return replace(config_needs(config, tensors, read_facts(source).max_model_len), tower=tower)


def _runs(name: str, config: dict[str, Any]) -> bool:
    """Return whether the layer is loaded: layers beyond the last one are heads that predict further tokens."""
    layer = _LAYER.match(name)
    if name.startswith("mtp."):
        return False
    return layer is None or int(layer[1]) < config.get("num_hidden_layers", math.inf)


def _bytes(tensor: GGUFTensor, of_weight: Mapping[int, float]) -> float | None:
    return math.prod(tensor.shape) * of_weight[tensor.type] if tensor.type in of_weight else None


def gguf_needs(file: GGUFFile) -> ModelNeeds:
    """Return the needs of a parsed GGUF header. Raises ConfigError."""
    heads, hidden = int(file.get("attention.head_count", 1)), int(file.get("embedding_length", 0))
    config = {
        "model_type": gguf_family(file),
        "hidden_size": hidden,
        "num_hidden_layers": layers_of(file),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("attention.head_count_kv"),
        "head_dim": file.get("attention.key_length"),
        **expert_fields(file),
        **hybrid_header(file),
        **(latent_fields(file) if gguf_family(file) in LATENT else {}),
        **(shape_fields(file, int(layers_of(file) or 0)) if gguf_family(file) in SHAPED else {}),
    }
    tensors = [
        Tensor(tensor.name, tensor.shape, _bytes(tensor, _STORED), _bytes(tensor, _CODED))
        for tensor in file.tensors.values()
        if runs(tensor.name, file)
    ]
    return config_needs(config, tensors, int(file.get("context_length", 0)))
