"""Ops: the interface of operations that every backend implements, and `select`, which chooses the backend.

`reference` is plain PyTorch and defines the meaning; tests compare every other backend with it. A model receives an Ops
and calls nothing else for arithmetic."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from kvferry.kernels.activation import Activation
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.capabilities import Capabilities
from kvferry.kernels.decoder_spec import DecoderForm, Gated, GroupedGated, Latent, Stored
from kvferry.kernels.decoder_step import OneByOne, Step
from kvferry.kernels.gate_spec import SILU, Gate
from kvferry.kernels.layer_norm import LayerNorm
from kvferry.kernels.linear import Linear, LinearOfHeads, StoredLinear
from kvferry.kernels.logit_adjustments import Adjusted
from kvferry.kernels.lora import LowRank
from kvferry.kernels.recurrent_ops import RecurrentOps
from kvferry.kernels.sampling import NoiseKeys
from kvferry.kernels.token_masks import Masks
from kvferry.protocol.sampling import SamplingParams

log = logging.getLogger("kvferry.kernels")


class DenseOps(Protocol):
    """Factory of dense layers, each made once at load."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Return the dense layer of weight [out, in] and bias [out]. It may keep the weight in a form of its own."""

    def linear_of_heads(self, weight: torch.Tensor) -> LinearOfHeads:
        """Return the dense layers of weight [heads, out, in], made once at load."""

    def grouped(self, each: Sequence[Gated | None]) -> GroupedGated | None:
        """Return the experts of a layer as grouped products, over weights that are moved together.

        None if this backend has none for them: then they run one by one."""

    def packed(self, parts: Sequence[Stored], columns: int, bias: torch.Tensor | None = None) -> StoredLinear | None:
        """Return the dense layer of stored rows or codes [.., columns], concatenated, that runs them as they are.

        None if this backend does not run them: then dequantise them."""


class Ops(DenseOps, RecurrentOps, Protocol):
    """Operations of a decoder layer.

    `kv_layer` is the pool's view of one layer, [num_blocks, planes, kv_heads, block_size, head_dim], strided, in the
    queries' dtype or in 8 bits (see `quantised_cache`). The planes hold K and V, or one plane serves as both."""

    name: str
    capabilities: Capabilities

    def record(self, form: DecoderForm, one_by_one: OneByOne) -> Step | None:
        """Return the decoder's step as one call; None if this backend cannot replay the form.

        The form's dense layers come from `linear` of this backend. one_by_one: the same step through the operations of
        this backend, which it may capture."""

    def add_low_rank(self, y: torch.Tensor, x: torch.Tensor, tokens: torch.Tensor, parts: Sequence[LowRank]) -> None:
        """Add x[tokens] @ down.T @ up.T of each part to its outputs of y[tokens], in place.

        x: [T, in]; y: [T, out]; tokens: int64, each once."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x * rsqrt(mean(x^2) + eps) * weight over the last dimension, statistics in float32. x: [..., d]."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (rms_norm(x + residual), x + residual)."""

    def gate_mul(self, gate_up: torch.Tensor, gate: Gate = SILU) -> torch.Tensor:
        """Return the gate of gate and up [T, 2 * d], in this order, in float32, rounded once; returns [T, d]."""

    def layer_norm(self, x: torch.Tensor, norm: LayerNorm, eps: float) -> torch.Tensor:
        """Return the layer norm of x [..., d]: see `kernels.layer_norm`."""

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return the activation of x [T, d], in float32, rounded once."""

    def rope_and_cache(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        kv_layer: torch.Tensor,
        plan: BatchPlan,
    ) -> torch.Tensor:
        """Apply rotary embedding to q and k, write k and v into the cache, return rotated q.

        q [T, heads, dim] and k [T, kv_heads, dim] are rotated by the half-split form (Su et al. 2021). cos, sin:
        float32 [max_len, rotary_dim / 2], indexed by position; None: no rotation. A rotary_dim smaller than dim leaves
        the rest unrotated. k and v are written at plan.slots unless negative. v None: the pool has one plane, and k may
        be wider than q. k None: nothing is written, as another layer wrote the K/V that this one reads."""

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        plan: BatchPlan,
        scale: float,
        window: int = 0,
        cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return causal attention [T, heads, dim] of q [T, heads, dim] over each sequence's cached K/V.

        Grouped heads share a K/V head. window > 0: only the last `window` positions, the token's own included; < 0:
        those since the last multiple of -window. cap > 0: a score s becomes cap * tanh(s / cap). sinks, float32
        [heads]: an extra score per head that takes its share of the weights and adds no value."""

    def adjust(self, logits: torch.Tensor, rows: Sequence[Adjusted], drawn: torch.Tensor | None = None) -> None:
        """Adjust rows of float32 logits [n, vocab] in place; each row is named at most once.

        The order is: additions to single tokens, the repetition penalty of all tokens so far, then frequency and
        presence penalties of the output (OpenAI API reference). drawn: int64 [m], tokens that rows refer to by
        `behind`; a negative one is none, and the result of its row is not used."""

    def latent_attention(
        self, q: torch.Tensor, kv_layer: torch.Tensor, plan: BatchPlan, scale: float, own: Latent
    ) -> torch.Tensor:
        """Return causal attention [T, heads, value] of rotated q over each sequence's cached vectors.

        q: [T, heads, rotated + plain]. The cache has one plane of one head [rotated + rank] (see `kernels.latent`)."""

    def draw(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], keys: NoiseKeys, masks: Masks = ()
    ) -> torch.Tensor:
        """Draw token ids int64 [n] from float32 logits [n, vocab], which may be overwritten.

        Each row's mask, temperature, min_p, top_k and top_p apply in this order. A token is drawn with its softmax
        probability among those its row keeps; if `is_greedy`, the most likely one is, the first of equals. A row
        depends only on its own parameters, key and mask. A row draws NO_TOKEN if a NaN is where its mask allows, or if
        its largest allowed logit is not finite."""


def select(name: str, device: torch.device, *, batch_invariant: bool = False, graphs: bool = True) -> Ops:
    """Return the backend called `name`. Raises ConfigError.

    auto: triton on a CUDA device; on a CPU, cpu if its extension is installed, else reference. batch_invariant: only
    cpu supports it. graphs: triton may capture decode steps."""
    from kvferry.protocol.errors import ConfigError

    if name == "auto":
        name = _best(device)
    if batch_invariant and name != "cpu":
        raise ConfigError(
            f"batch_invariant needs --kernels cpu on a CPU, and the compiled extension; here it would be {name}",
            param="batch_invariant",
        )
    if name == "cpu":
        from kvferry.kernels.cpu import CpuOps, instruction_set

        if device.type != "cpu" or instruction_set() is None:
            raise ConfigError("kernels cpu needs a CPU device and the compiled extension", param="kernels")
        return CpuOps(batch_invariant=batch_invariant)
    if name == "reference":
        from kvferry.kernels.reference import ReferenceOps

        return ReferenceOps()
    if name == "triton":
        from kvferry.kernels.triton import TritonOps

        return TritonOps(graphs=graphs)
    raise ConfigError(f"kernels must be auto, reference, cpu or triton, got {name!r}", param="kernels")


def _best(device: torch.device) -> str:
    if device.type == "cuda":
        return "triton"
    if device.type == "cpu":
        from kvferry.kernels.cpu import instruction_set

        if instruction_set() is not None:
            return "cpu"
        log.warning("the CPU kernels are not compiled: PyTorch's operations serve, which are several times slower")
    return "reference"
