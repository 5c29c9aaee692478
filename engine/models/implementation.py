"""Chooses a model's implementation from config and headers: own decoder, transformers' modules, or an encoder."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from kvferry.engine.models.config import parse_config
from kvferry.engine.models.dequantise import BLOCKS, CODED, PLAIN, stored_bytes
from kvferry.engine.models.families import FAMILIES
from kvferry.engine.models.gguf_config import parse_gguf
from kvferry.engine.models.hf import gguf_architectures, language_models
from kvferry.engine.models.layer_lifetimes import groups_of
from kvferry.engine.models.unsupported_configs import unsupported
from kvferry.model_files.gguf import GGUFFile, gguf_parts, read_gguf
from kvferry.model_files.memory_needs import has_experts
from kvferry.model_files.multimodal import text_config
from kvferry.model_files.quantisation import quantisation
from kvferry.model_files.source import ModelSource, read_json
from kvferry.model_files.supported_decoders import gguf_family, own_alone
from kvferry.model_files.supported_encoders import is_encoder
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.layer_groups import LayerGroups

OWN, ENCODER = "kvferry's own decoder", "an encoder of transformers"
TRANSFORMERS = "transformers modules around kvferry's attention and dense layers"


@dataclass(frozen=True, slots=True)
class Implementation:
    """Implementation that runs a model. formats: of its weights, as stored. groups: of its layers, see `groups_of`."""

    family: str
    path: str
    formats: str
    groups: LayerGroups | None = None


def implementation_of(source: ModelSource, impl: str = "auto") -> Implementation:
    """Return the implementation.

    impl: as in `load_model`. Raises ConfigError if the model cannot run, with the reason."""
    return _gguf(read_gguf(source.path), impl) if source.kind == "gguf" else _directory(source, impl)


def _directory(source: ModelSource, impl: str) -> Implementation:
    whole = read_json(source.path / "config.json")
    config, family, stored = text_config(whole), str(whole.get("model_type", "")), quantisation(whole)
    formats = (
        str(config.get("dtype") or config.get("torch_dtype") or "float32") if stored is None else stored.describe()
    )
    if not stored and whole.get("quantization_config"):
        formats += f", experts in {whole['quantization_config']['quant_method']}"
    if is_encoder(whole):
        return Implementation(family, ENCODER, formats)
    reason, own_only = unsupported(config), own_alone(whole)
    if impl != "transformers" and (reason is None or impl == "kvferry" or own_only):
        return Implementation(family, OWN, formats, groups_of(parse_config(config)))
    if own_only is not None:
        raise ConfigError(f"{own_only} runs only on kvferry's own decoder", param="model_impl")
    if stored is not None and has_experts(source):
        raise ConfigError(
            f"experts in codes of {stored.method} run only on kvferry's own decoder: {reason or impl}", param="model"
        )
    _require_known(str(config.get("model_type") or family))
    return Implementation(family, TRANSFORMERS, formats)


def _require_known(kind: str) -> None:
    if kind not in language_models():
        raise ConfigError(
            f"neither kvferry's own decoder nor transformers supports a language model of architecture {kind!r}",
            param="model",
        )


def _gguf(file: GGUFFile, impl: str) -> Implementation:
    kinds = sorted({tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1})
    for kind in kinds:
        stored_bytes(kind, 256)
    names = BLOCKS | CODED
    formats = "GGUF of " + " and ".join(names.get(kind) or str(PLAIN[kind]).removeprefix("torch.") for kind in kinds)
    family = FAMILIES.get(gguf_family(file))
    if impl != "transformers" and ((family is not None and family.gguf) or impl == "kvferry"):
        return Implementation(file.architecture, OWN, formats, groups_of(parse_gguf(file)))
    if len(gguf_parts(file.path)) > 1:
        raise ConfigError("split GGUF files run only on kvferry's own decoder", param="model")
    if file.architecture not in gguf_architectures():
        raise ConfigError(f"no reader supports GGUF files of architecture {file.architecture!r}", param="model")
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError(
            f"GGUF files of architecture {file.architecture!r} need accelerate; run: pip install accelerate",
            param="model",
        )
    return Implementation(file.architecture, TRANSFORMERS, formats)
