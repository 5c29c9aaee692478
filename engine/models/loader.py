"""load_model: builds a model from its source (directory or GGUF) on a device, by our own decoder or transformers."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from kvferry.engine.models.base import Model, ModelInfo
from kvferry.engine.models.config import DecoderConfig, parse_config
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.models.decoder_info import decoder_info
from kvferry.engine.models.directory import FileWeights, open_directory
from kvferry.engine.models.dummy_weights import DummyWeights
from kvferry.engine.models.families import FAMILIES
from kvferry.engine.models.gemma3n import Gemma3nDecoder, Gemma3nLoader
from kvferry.engine.models.gemma4 import Gemma4Decoder, Gemma4Loader
from kvferry.engine.models.gguf_decoder import open_gguf
from kvferry.engine.models.heap_trim import trim_heap
from kvferry.engine.models.multipliers import MultipliedWeights
from kvferry.engine.models.parameters import ParameterLoader, Parameters, Progress
from kvferry.engine.models.reader import Peaks, TensorReader, whole_rows
from kvferry.engine.models.rope import stretched
from kvferry.engine.models.rotations import rotations_of
from kvferry.engine.models.shared_weights import one_copy
from kvferry.engine.models.stacked import StackedWeights
from kvferry.engine.models.tensor_names import renamed
from kvferry.engine.models.unsupported_configs import unsupported
from kvferry.engine.models.weights import Weights
from kvferry.engine.ranks.layers import joined
from kvferry.engine.ranks.rank_assignment import RankAssignment
from kvferry.engine.ranks.shard import FLAG
from kvferry.engine.ranks.weights import ShardWeights
from kvferry.kernels.cpu import CpuOps
from kvferry.kernels.ops import Ops
from kvferry.model_files.gguf import read_gguf
from kvferry.model_files.memory_needs import has_experts
from kvferry.model_files.multimodal import is_multimodal, text_config
from kvferry.model_files.quantisation import quantisation
from kvferry.model_files.read_errors import naming
from kvferry.model_files.recurrent import StateSpaceSizes
from kvferry.model_files.source import ModelSource, read_facts, read_json
from kvferry.model_files.supported_decoders import gguf_family, own_alone
from kvferry.model_files.unsupported_models import require_runnable
from kvferry.protocol.errors import ConfigError, reason

log = logging.getLogger("kvferry.models")

IMPLEMENTATIONS = ("auto", "kvferry", "transformers")
OWN_LAYERS: dict[str, tuple[type[Decoder], type[ParameterLoader]]] = {
    "gemma3n_text": (Gemma3nDecoder, Gemma3nLoader),
    "gemma4_text": (Gemma4Decoder, Gemma4Loader),
}
"""Decoders and loaders of families whose layers a row of `FAMILIES` does not describe."""


def load_model(
    source: ModelSource,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    ops: Ops,
    impl: str = "auto",
    quantization: str = "none",
    load_format: str = "auto",
    max_model_len: int = 0,
    progress: Progress | None = None,
    weights_fd: int = -1,
    part: RankAssignment | None = None,
) -> Model:
    """Return the model of `source` in `dtype` (None: `auto_dtype`).

    impl: kvferry (own decoder), transformers, or auto (own decoder if it supports the architecture). quantization: auto
    (block formats of a GGUF and codes of a quantised checkpoint run as stored if the operations can, in bfloat16),
    none, or int8 (dense layers quantised per channel). load_format: auto, or dummy: random weights for our own decoder.
    max_model_len: longest sequence in tokens; 0: the model's own limit, which `info` has in any case. progress:
    receives the loaded fraction, 0 to 1. weights_fd: memory that processes with the same model share
    (`runtime.shared_file`), or -1. part: the shard of our own decoder that a rank loads, or None. Raises ConfigError
    naming the missing or unsupported part, for any exception on the way."""
    if impl not in IMPLEMENTATIONS:
        raise ConfigError(f"model_impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}", param="model_impl")
    require_runnable(source)
    with naming(source.name):
        try:
            opened = _open_as(source, impl, load_format)
            return _load(source, opened, device, dtype, ops, quantization, max_model_len, progress, weights_fd, part)
        except ConfigError:
            raise
        except Exception as error:
            log.debug("loading %s", source.path, exc_info=True)
            problem = f"{source.name} cannot be run: {reason(error)}"
            # PyTorch's allocator on a CPU raises a plain RuntimeError.
            if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                problem = f"the weights of {source.name} do not fit the memory of {device}"
            raise ConfigError(problem, param="model") from error


def _load(
    source: ModelSource,
    opened: OpenedModel | None,
    device: torch.device,
    dtype: torch.dtype | None,
    ops: Ops,
    quantization: str,
    max_model_len: int,
    progress: Progress | None,
    weights_fd: int,
    part: RankAssignment | None,
) -> Model:
    """Load the model. opened: None for transformers' model."""
    if dtype is None:
        dtype = auto_dtype(device, compiled=ops.name == "cpu" and (opened is not None or not has_experts(source)))
    codes = ops.capabilities.codes and (opened is not None or ops.name == "cpu")
    if quantization == "int8" and (not codes or dtype != torch.bfloat16):
        raise ConfigError(
            "quantization int8 needs bfloat16 on the cpu kernels, or kvferry's own decoder on the triton kernels",
            param="quantization",
        )
    if opened is None:
        if part is not None:
            raise ConfigError(f"{FLAG} needs kvferry's own decoder, not transformers", param=FLAG)
        from kvferry.engine.models.hf_loader import load_hf

        model = load_hf(
            source, device=device, dtype=dtype, ops=ops, quantization=quantization, progress=progress,
            weights_fd=weights_fd,
        )  # fmt: skip
        trim_heap()
        return model
    if dtype != torch.bfloat16 or not ops.capabilities.codes:
        quantization = "none"
    decoder = _load_decoder(source, opened, device, dtype, ops, quantization, max_model_len, progress, weights_fd, part)
    del opened
    trim_heap()
    return decoder


def read_info(source: ModelSource, impl: str, max_model_len: int) -> ModelInfo | None:
    """Return the facts of our own decoder with plain weights, without reading the weights.

    None for other models, whose facts are known only once their weights are read."""
    opened = _open_as(source, impl, "auto")
    if opened is None or source.kind == "gguf" or quantisation(read_json(source.path / "config.json")) is not None:
        return None
    length = min(max_model_len or opened.max_model_len, opened.max_model_len)
    long = ("longrope",) if stretched(opened.config.rope, length) else ()
    return decoder_info(source, opened.config, opened.max_model_len, long)


def auto_dtype(device: torch.device, compiled: bool) -> torch.dtype:
    """Return bfloat16 on a GPU, on our compiled CPU kernels, and on a CPU that multiplies it natively; else float32.

    On other CPUs PyTorch is several times faster in float32, experts of transformers' modules included."""
    if device.type == "cuda" or compiled:
        return torch.bfloat16
    known = torch.cpu.get_capabilities()
    return torch.bfloat16 if known.get("avx512_bf16") or known.get("amx_bf16") else torch.float32


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """Checkpoint of a known family whose tensors are not read yet. rope_divisors: of a GGUF that has them."""

    config: DecoderConfig
    weights: Weights
    max_model_len: int
    rope_divisors: torch.Tensor | None = None


def _open_as(source: ModelSource, impl: str, load_format: str) -> OpenedModel | None:
    """Return the checkpoint for our own decoder; None where transformers' model is to be loaded."""
    dummy, required = load_format == "dummy", impl == "kvferry"
    if dummy and (impl == "transformers" or source.kind == "gguf"):
        raise ConfigError("dummy weights need a config.json and kvferry's own decoder", param="load_format")
    if impl == "transformers":
        if source.kind != "gguf" and (what := own_alone(read_json(source.path / "config.json"))) is not None:
            raise ConfigError(f"{what} runs only on kvferry's own decoder", param="model_impl")
        return None
    return _open_gguf(source, required) if source.kind == "gguf" else _open_directory(source, required or dummy, dummy)


def _open_directory(source: ModelSource, required: bool, dummy: bool) -> OpenedModel | None:
    whole = read_json(source.path / "config.json")
    config, multimodal = text_config(whole), is_multimodal(whole)
    if not required and own_alone(whole) is None and unsupported(config) is not None:
        return None
    length = read_facts(source).max_model_len
    if not length:
        raise ConfigError(f"{source.path}/config.json has no max_position_embeddings", param="model")
    parsed = parse_config(config)
    if dummy:
        return OpenedModel(parsed, DummyWeights(parsed), length)
    weights = open_directory(source.path, quantisation(whole), renamed(parsed.model_type))
    if multimodal:
        parsed = replace(parsed, tie_embeddings=not weights.holds("lm_head.weight"))
    if parsed.multipliers and parsed.hybrid and isinstance(parsed.hybrid.sizes, StateSpaceSizes):
        return OpenedModel(parsed, MultipliedWeights(weights, parsed.multipliers, parsed.hybrid.sizes), length)
    if (names := parsed.family.experts) and names.stack and isinstance(weights, FileWeights):
        return OpenedModel(parsed, StackedWeights(weights, names, names.stack), length)
    return OpenedModel(parsed, weights, length)


def _open_gguf(source: ModelSource, required: bool) -> OpenedModel | None:
    file = read_gguf(source.path)
    family = FAMILIES.get(gguf_family(file))
    if not required and (family is None or not family.gguf):
        return None
    config, weights = open_gguf(file)
    return OpenedModel(config, weights, read_facts(source).max_model_len, weights.rope_divisors())


def _load_decoder(
    source: ModelSource,
    opened: OpenedModel,
    device: torch.device,
    dtype: torch.dtype,
    ops: Ops,
    quantization: str,
    max_model_len: int,
    progress: Progress | None,
    weights_fd: int,
    part: RankAssignment | None,
) -> Decoder:
    config, weights = opened.config, opened.weights
    build, load = OWN_LAYERS.get(config.model_type, (Decoder, ParameterLoader))
    peaks: Peaks = whole_rows
    if part is not None:
        weights = ShardWeights(weights, config, part.shard)
        config, peaks = part.shard.of(config), weights.peaks

    def read() -> tuple[Parameters, list[str]]:
        reader = TensorReader(config, weights, device, dtype, ops, quantization, peaks)
        return load(reader, progress).load(), sorted(reader.kept)

    if weights_fd >= 0 and isinstance(ops, CpuOps) and dtype == torch.bfloat16:
        form = f"{source.path} {source.revision} {config} {quantization}"
        parameters, kept = one_copy(weights_fd, ops.kernels, form, read)
    else:
        parameters, kept = read()
    if part is not None:
        parameters = joined(parameters, part.group, opened.config)
    length = min(max_model_len or opened.max_model_len, opened.max_model_len)
    long = ("longrope",) if stretched(config.rope, length) else ()
    info = decoder_info(source, opened.config, opened.max_model_len, (*kept, *long))
    rotations = rotations_of(config, length, device, opened.rope_divisors)
    return build(config, info, parameters, rotations, ops)
