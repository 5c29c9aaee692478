"""Loads transformers' causal LMs as HFModel, and checks with two tokens that attention and logits are as expected."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from kvferry.engine.models.base import ModelInfo
from kvferry.engine.models.dense_forms import DenseForms
from kvferry.engine.models.directory import open_directory
from kvferry.engine.models.hf import ATTENTION, HFModel, hidden_states, logits_of, transformers_module
from kvferry.engine.models.hf_attention import AttentionSlot, ShapeProbe, attach_slot
from kvferry.engine.models.hf_dense import pack_modules
from kvferry.engine.models.hf_stored import GGUFRows, coded_layers
from kvferry.engine.models.parameters import Progress
from kvferry.engine.models.shared_weights import one_copy
from kvferry.kernels.cpu import CpuOps
from kvferry.kernels.ops import Ops
from kvferry.model_files.context_length import steady_length
from kvferry.model_files.gguf import gguf_parts, read_gguf
from kvferry.model_files.quantisation import quantisation
from kvferry.model_files.source import ModelSource, read_facts, read_json
from kvferry.protocol.errors import ConfigError, reason


def load_hf(
    source: ModelSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    ops: Ops,
    quantization: str = "none",
    progress: Progress | None = None,
    weights_fd: int = -1,
) -> HFModel:
    """Load through AutoModelForCausalLM, with dense layers in the operations' forms. Parameters as in `load_model`.

    Two tokens prove that attention and logits go through our code. Raises ConfigError with transformers' reason, or
    naming the unsupported feature."""
    if source.kind == "gguf" and len(gguf_parts(source.path)) > 1:
        raise ConfigError(f"{source.name} is a split GGUF; transformers does not read split files", param="model")
    length = read_facts(source).max_model_len
    if source.kind != "gguf":
        length = min(length, steady_length(read_json(source.path / "config.json")))
    if not length:
        raise ConfigError(f"{source.path} does not give the model's longest sequence", param="model")
    module, kept = _shared(source, device, dtype, ops, quantization, progress, weights_fd)
    slot = attach_slot(module)
    probe, vocab_size = _probe(module, slot, device)
    info = ModelInfo(
        name=source.name,
        revision="+".join((source.revision, *kept)),
        num_layers=len(probe.shapes),
        num_kv_heads=probe.shapes[0].kv_heads,
        head_dim=probe.shapes[0].head_dim,
        vocab_size=vocab_size,
        max_model_len=length,
    )
    if progress is not None:
        progress(1.0)
    return HFModel(module, slot, info, device, dtype, ops)


def _shared(
    source: ModelSource,
    device: torch.device,
    dtype: torch.dtype,
    ops: Ops,
    quantization: str,
    progress: Progress | None,
    weights_fd: int,
) -> tuple[Any, list[str]]:
    """Return the module and the formats of its layers; processes that share the memory pack it once."""
    forms = DenseForms(ops, quantization if dtype == torch.bfloat16 else "none")

    def read() -> tuple[Any, list[str]]:
        module = _packed(source, device, dtype, forms)
        if progress is not None:
            progress(0.9)
        return module, sorted(forms.kept)

    if weights_fd >= 0 and isinstance(ops, CpuOps) and dtype == torch.bfloat16:
        transformers_module()
        return one_copy(weights_fd, ops.kernels, f"transformers {source.path} {source.revision} {quantization}", read)
    return read()


def _packed(source: ModelSource, device: torch.device, dtype: torch.dtype, forms: DenseForms) -> Any:
    quantised = None if source.kind == "gguf" else quantisation(read_json(source.path / "config.json"))
    if quantised is None:
        module = _load_module(source, dtype)
    else:
        module = _load_quantised(source, open_directory(source.path, quantised), forms, dtype, device)
    try:
        module = module.to(device).eval()
        pack_modules(module, forms, GGUFRows(read_gguf(source.path)) if source.kind == "gguf" else None)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"the model's weights do not fit the memory of {device}", param="model") from error
    return module


def _load_quantised(
    source: ModelSource, weights: Any, forms: DenseForms, dtype: torch.dtype, device: torch.device
) -> Any:
    """Return the module of a checkpoint whose quantised layers we read ourselves.

    transformers reads the rest into a subclass that has them already. It has the same name, because transformers
    renames tensors by that."""
    transformers = transformers_module()
    config = transformers.AutoConfig.from_pretrained(source.path, local_files_only=True)
    for name in ("quantization_config", "compression_config"):
        config.__dict__.pop(name, None)
    with torch.device("meta"), _as_config_error(source):
        skeleton = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    kind = type(skeleton)
    coded = coded_layers(skeleton, weights, forms, dtype, device)

    def made(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        for name, layer in coded.items():
            self.set_submodule(name, layer)

    same = type(kind.__name__, (kind,), {"__init__": made, "__module__": kind.__module__})
    module = _load_module(source, dtype, same, config=config)
    module.__class__ = kind
    coded.clear()  # the subclass lives on
    return module


def _load_module(source: ModelSource, dtype: torch.dtype, kind: Any = None, **extra: Any) -> Any:
    """Load the module with every weight from the checkpoint; transformers would fill missing ones with noise.

    kind: class of the module; None: the config's."""
    transformers = transformers_module()
    is_file = source.kind == "gguf"
    place = source.path.parent if is_file else source.path
    extra |= {"gguf_file": source.path.name} if is_file else {}
    with _as_config_error(source):
        module, loaded = (kind or transformers.AutoModelForCausalLM).from_pretrained(
            place,
            dtype=dtype,
            attn_implementation=ATTENTION,
            local_files_only=True,
            output_loading_info=True,
            **extra,
        )
    missing = sorted(loaded["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise ConfigError(f"the model's files lack the tensor {missing[0]}{more}", param="model")
    return module


@contextlib.contextmanager
def _as_config_error(source: ModelSource) -> Iterator[None]:
    """Turn exceptions of transformers into a ConfigError of one line."""
    try:
        yield
    except Exception as error:
        why = reason(error)
        if isinstance(error, KeyError) and ATTENTION in why:
            why = "its attention does not use transformers' attention interface"
        raise ConfigError(f"transformers cannot load {source.name}: {why}", param="model") from error


@torch.inference_mode()
def _probe(module: Any, slot: AttentionSlot, device: torch.device) -> tuple[ShapeProbe, int]:
    """Return the layers' attention shapes and the width of the logits."""
    if "position_ids" not in inspect.signature(module.base_model.forward).parameters:
        raise ConfigError(f"{type(module).__name__} takes no position_ids, which is not supported", param="model")
    tokens, positions = torch.zeros(2, dtype=torch.long, device=device), torch.arange(2, device=device)
    slot.attention = probe = ShapeProbe()
    try:
        ours = logits_of(module, hidden_states(module, tokens, positions))
        probe.check(module.config)
        whole = module(input_ids=tokens[None], position_ids=positions[None], use_cache=False).logits[0].float()
    finally:
        slot.attention = None
    if not torch.allclose(ours, whole, rtol=2e-2, atol=2e-2):
        raise ConfigError(f"{type(module).__name__} changes its logits in a way that is not supported", param="model")
    return probe, whole.shape[-1]
