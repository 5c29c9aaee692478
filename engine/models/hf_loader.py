"""From a model source to a model of transformers over our paged cache, proven to be what it is taken for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from engine.models.base import ModelInfo
from engine.models.hf import ATTENTION, HFModel, hidden_states, logits_of, transformers_module
from engine.models.hf_attention import Seat, ShapeProbe, take_seats
from kernels.ops import Ops
from model_files.gguf import gguf_parts
from model_files.length import steady_length
from model_files.quantisation import quantisation
from model_files.source import ModelSource, read_facts, read_json
from protocol.errors import ConfigError


def load_hf(
    source: ModelSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    ops: Ops,
    progress: Callable[[float], None] | None = None,
) -> HFModel:
    """Load through AutoModelForCausalLM and prove on two tokens that attention and logits go our way. Raises
    ConfigError with transformers' reason, or naming what of the model is not supported."""
    if source.kind == "gguf" and len(gguf_parts(source.path)) > 1:
        raise ConfigError(f"{source.name} is a split GGUF; transformers reads whole ones alone", param="model")
    if source.kind != "gguf" and (stored := quantisation(read_json(source.path / "config.json"))) is not None:
        raise ConfigError(
            f"checkpoints of {stored.method} run on our own decoder alone, and this architecture runs on transformers",
            param="model",
        )
    length = read_facts(source).max_model_len
    if source.kind != "gguf":
        length = min(length, steady_length(read_json(source.path / "config.json")))
    if not length:
        raise ConfigError(f"{source.path} does not name the model's longest sequence", param="model")
    module = _load_module(source, dtype)
    if progress is not None:
        progress(0.9)
    try:
        module = module.to(device).eval()
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"the model's weights do not fit the memory of {device}", param="model") from error
    seat = take_seats(module)
    probe, vocab_size = _probe(module, seat, device)
    info = ModelInfo(
        name=source.name,
        revision=source.revision,
        num_layers=len(probe.shapes),
        num_kv_heads=probe.shapes[0].kv_heads,
        head_dim=probe.shapes[0].head_dim,
        vocab_size=vocab_size,
        max_model_len=length,
    )
    if progress is not None:
        progress(1.0)
    return HFModel(module, seat, info, device, ops)


def _load_module(source: ModelSource, dtype: torch.dtype) -> Any:
    """The module with every weight from the checkpoint: transformers itself would fill what is missing with noise."""
    transformers = transformers_module()
    is_file = source.kind == "gguf"
    place = source.path.parent if is_file else source.path
    extra = {"gguf_file": source.path.name} if is_file else {}
    try:
        module, loaded = transformers.AutoModelForCausalLM.from_pretrained(
            place,
            dtype=dtype,
            attn_implementation=ATTENTION,
            local_files_only=True,
            output_loading_info=True,
            **extra,
        )
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if isinstance(error, KeyError) and ATTENTION in reason:
            reason = "its attention does not use transformers' attention interface"
        raise ConfigError(f"transformers cannot load {source.name}: {reason}", param="model") from error
    missing = sorted(loaded["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise ConfigError(f"the model's files lack the tensor {missing[0]}{more}", param="model")
    return module


@torch.inference_mode()
def _probe(module: Any, seat: Seat, device: torch.device) -> tuple[ShapeProbe, int]:
    """What the layers ask for, and the width of the logits."""
    if "position_ids" not in inspect.signature(module.base_model.forward).parameters:
        raise ConfigError(f"{type(module).__name__} takes no position_ids, which is not supported", param="model")
    tokens, positions = torch.zeros(2, dtype=torch.long, device=device), torch.arange(2, device=device)
    seat.attention = probe = ShapeProbe()
    try:
        ours = logits_of(module, hidden_states(module, tokens, positions))
        probe.check(module.config)
        whole = module(input_ids=tokens[None], position_ids=positions[None], use_cache=False).logits[0].float()
    finally:
        seat.attention = None
    if not torch.allclose(ours, whole, rtol=2e-2, atol=2e-2):
        raise ConfigError(f"{type(module).__name__} changes its logits in a way that is not supported", param="model")
    return probe, whole.shape[-1]
