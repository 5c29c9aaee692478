"""HFModel: runs transformers' causal LMs over the paged KV cache; the only module that imports transformers itself.

transformers probes for a distribution named `kernels` and, if one is installed, imports names from the package of that
name. In a process started at the repository's root, that package is our folder. So the probe is made to answer false
before any modelling code loads."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch

from kvferry.engine.models.base import KeepGoing, Model, ModelInfo, SuspendedPass
from kvferry.engine.models.hf_attention import AttentionSlot, PagedAttention, slot_attention
from kvferry.engine.models.hf_dense import DenseModule
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.decoder_step import always
from kvferry.kernels.ops import Ops

ATTENTION = "kvferry_paged"


def transformers_module() -> Any:
    """Return the transformers package, with `is_kernels_available` false and our attention registered."""
    import transformers.utils
    from transformers.utils import import_utils

    for module in (import_utils, transformers.utils):
        module.is_kernels_available = _not_available
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    transformers.AttentionInterface.register(ATTENTION, slot_attention)
    return transformers


def _not_available(*_: Any, **__: Any) -> bool:
    return False


def language_models() -> Container[str]:
    """Return the architectures for which transformers has a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: dict[str, str] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return found


def gguf_architectures() -> Container[str]:
    """Return the architectures whose GGUF files transformers reads."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    found: list[str] = GGUF_SUPPORTED_ARCHITECTURES
    return found


class HFModel(Model):
    """Implements `engine.models.base.Model` with a flat batch [1, T], the plan's positions, and no cache of its own."""

    def __init__(
        self, module: Any, slot: AttentionSlot, info: ModelInfo, device: torch.device, dtype: torch.dtype, ops: Ops
    ):
        self.info = info
        self.device = device
        self.dtype = dtype
        self._module = module
        self._slot = slot
        self.ops = ops

    def forward(
        self,
        token_ids: torch.Tensor,
        kv: torch.Tensor,
        plan: BatchPlan,
        keep_going: KeepGoing = always,
        halfway: SuspendedPass | None = None,
    ) -> torch.Tensor:
        assert halfway is None, "a transformers module cannot resume a pass"
        self._slot.attention = PagedAttention(self.ops, kv, plan, self.dtype, keep_going)
        try:
            return hidden_states(self._module, token_ids, plan.positions)
        finally:
            self._slot.attention = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return logits_of(self._module, hidden)


def hidden_states(module: Any, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the hidden states [T, hidden] of a flat batch."""
    out = module.base_model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
    hidden: torch.Tensor = out.last_hidden_state[0]
    return hidden


def logits_of(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Return float32 logits, with the scalings that Cohere, Granite and Gemma name in their configs."""
    config, head = module.config, module.get_output_embeddings()
    packed = isinstance(head, DenseModule)
    logits: torch.Tensor = head.of_rows(hidden, torch.float32) if packed else head(hidden).float()
    logits = logits * (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return torch.tanh(logits / cap) * cap if cap else logits
