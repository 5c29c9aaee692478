"""The only door to transformers: any causal LM of its library behind our `Model` seam, over our paged cache.

transformers probes for a distribution named `kernels` and, where one is installed, imports names from whatever package
answers to that name; here that is our own. So the probe is made to answer false before any modelling code loads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container
from typing import Any

import torch

from engine.models.base import Halfway, Model, ModelInfo, Wanted, always
from engine.models.hf_attention import PagedAttention, Seat, ShapeProbe, seated_attention, take_seats
from kernels.ops import Ops
from kernels.plan import BatchPlan
from model_files.gguf import gguf_parts
from model_files.length import steady_length
from model_files.quantisation import quantisation
from model_files.source import ModelSource, read_facts, read_json
from protocol.errors import ConfigError

ATTENTION = "kvferry_paged"


def transformers_module() -> Any:
    """The transformers package, with `is_kernels_available` false and our attention registered."""
    import transformers.utils
    from transformers.utils import import_utils

    for module in (import_utils, transformers.utils):
        module.is_kernels_available = _not_available
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    transformers.AttentionInterface.register(ATTENTION, seated_attention)
    return transformers


def _not_available(*_: Any, **__: Any) -> bool:
    return False


def language_models() -> Container[str]:
    """Architectures that it has a causal language model of."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: dict[str, str] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return found


def gguf_architectures() -> Container[str]:
    """Those of which it reads GGUF files."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    found: list[str] = GGUF_SUPPORTED_ARCHITECTURES
    return found


class HFModel(Model):
    """A `Model`: a flat batch [1, T] with the plan's positions, no cache of transformers."""

    def __init__(self, module: Any, seat: Seat, info: ModelInfo, device: torch.device, ops: Ops):
        self.info = info
        self.device = device
        self.dtype: torch.dtype = module.dtype
        self._module = module
        self._seat = seat
        self.ops = ops

    def forward(
        self,
        token_ids: torch.Tensor,
        kv: torch.Tensor,
        plan: BatchPlan,
        wanted: Wanted = always,
        halfway: Halfway | None = None,
    ) -> torch.Tensor:
        assert halfway is None, "a module of transformers gives up without a trace"
        self._seat.attention = PagedAttention(self.ops, kv, plan, self.dtype, wanted)
        try:
            return _hidden(self._module, token_ids, plan.positions)
        finally:
            self._seat.attention = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return _logits(self._module, hidden)


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
        ours = _logits(module, _hidden(module, tokens, positions))
        probe.check(module.config)
        whole = module(input_ids=tokens[None], position_ids=positions[None], use_cache=False).logits[0].float()
    finally:
        seat.attention = None
    if not torch.allclose(ours, whole, rtol=2e-2, atol=2e-2):
        raise ConfigError(f"{type(module).__name__} changes its logits in a way that is not supported", param="model")
    return probe, whole.shape[-1]


def _hidden(module: Any, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    out = module.base_model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
    hidden: torch.Tensor = out.last_hidden_state[0]
    return hidden


def _logits(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """float32 logits, with the scalings that Cohere, Granite and Gemma name in their configs."""
    config = module.config
    logits: torch.Tensor = module.get_output_embeddings()(hidden).float()
    logits = logits * (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return torch.tanh(logits / cap) * cap if cap else logits
