"""Operations interface that every backend implements.

`reference` is plain PyTorch and defines the meaning; every other row is tested against it. A model receives an Ops and
calls nothing else for arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.capabilities import Capabilities
from kvferry.kernels.decoder_spec import (
    DecoderForm,
    Gated,
    GroupedGated,
    Latent,
    Linear,
    LinearOfHeads,
    OneByOne,
    Step,
    Stored,
    StoredLinear,
)
from kvferry.kernels.gated_activation import SILU, Gate
from kvferry.kernels.logit_adjustments import Adjusted
from kvferry.kernels.lora import LowRank
from kvferry.kernels.sampling import NoiseKeys
from kvferry.kernels.token_masks import Masks
from kvferry.protocol.sampling import SamplingParams


class DenseOps(Protocol):
    """Makes dense layers, each once at load."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """The dense layer of weight [out, in] and bias [out], made once at load: it may keep the weight in a form of
        its own."""

    def linear_of_heads(self, weight: torch.Tensor) -> LinearOfHeads:
        """Return the dense layers of weight [heads, out, in], made once at load."""

    def grouped(self, each: Sequence[Gated | None]) -> GroupedGated | None:
        """The experts of a layer as grouped products, over weights that are moved together; None where this row of the
        table has none for them: they run one by one then."""

    def packed(self, parts: Sequence[Stored], columns: int, bias: torch.Tensor | None = None) -> StoredLinear | None:
        """The dense layer of stored rows or codes [.., columns] laid under each other, run as they are; None where this
        row of the table does not run them: dequantise them then."""


class Ops(DenseOps, Protocol):
    """Operations of a decoder layer.

    `kv_layer` is the pool's view of one layer, [num_blocks, planes, kv_heads, block_size, head_dim], strided, in the
    queries' dtype or in 8 bits (see `quantised_cache`). Planes are those of K and of V, or one whose vectors are both.
    """

    name: str
    capabilities: Capabilities

    def record(self, form: DecoderForm, one_by_one: OneByOne) -> Step | None:
        """The decoder's step as one call, where this row can replay the form; its dense layers are this row's `linear`.

        one_by_one: the same through the operations of this row, which it may capture."""

    def add_low_rank(self, y: torch.Tensor, x: torch.Tensor, tokens: torch.Tensor, parts: Sequence[LowRank]) -> None:
        """Add x[tokens] @ down.T @ up.T of each part to its outputs of y[tokens], in place.

        x: [T, in]; y: [T, out]; tokens: int64, each once."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x * rsqrt(mean(x^2) + eps) * weight over the last dimension, statistics in float32. x: [..., d]."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual)."""

    def gate_mul(self, gate_up: torch.Tensor, gate: Gate = SILU) -> torch.Tensor:
        """Return the gate of gate and up [T, 2 * d], in this order, in float32, rounded once; returns [T, d]."""

    def rope_and_cache(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        kv_layer: torch.Tensor,
        plan: BatchPlan,
    ) -> torch.Tensor:
        """Rotate q [T, heads, dim] and k [T, kv_heads, dim] by the half-split rotary embedding (Su et al.

        2021; cos, sin: float32 [max_len, rotary_dim / 2], indexed by position; None: no rotation), write k and v into
        the cache at plan.slots (where they are not below 0), return rotated q. A rotary_dim smaller than dim leaves the
        rest unrotated. v None: of a pool of one plane; k may be wider than q then."""

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
        """Causal attention of q [T, heads, dim] over the cached K/V of each sequence; grouped heads share a K/V head;
        window > 0: only the last `window` positions, the token's own included; cap > 0: a score s becomes
        cap * tanh(s / cap); sinks, float32 [heads]: a score of each head that takes its share of the weights and brings
        no value. Returns [T, heads, dim]."""

    def adjust(self, logits: torch.Tensor, rows: Sequence[Adjusted], drawn: torch.Tensor | None = None) -> None:
        """Change rows of float32 logits [n, vocab] in place as their adjustments say, each row named once at most: what
        is added to single tokens, then the repetition penalty of all tokens so far, then frequency and presence
        penalties of the output (OpenAI API reference). drawn: int64 [m], tokens of which rows are `behind` one; one
        below 0 is none, and what follows it is nobody's."""

    def latent_attention(
        self, q: torch.Tensor, kv_layer: torch.Tensor, plan: BatchPlan, scale: float, own: Latent
    ) -> torch.Tensor:
        """Causal attention of rotated q [T, heads, rotated + plain] over each sequence's cached vectors, one plane of
        one head [rotated + rank] (see `kernels.latent`). Returns [T, heads, value]."""

    def draw(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], keys: NoiseKeys, masks: Masks = ()
    ) -> torch.Tensor:
        """Token ids int64 [n] drawn from float32 logits [n, vocab], which may be overwritten, by each row's mask,
        temperature, min_p, top_k and top_p, in this order. A token is drawn with the probability that softmax gives it
        among those its row keeps; where `is_greedy`, the most likely one is, the first of equal ones. A row depends on
        its own parameters, key and mask alone. A row that has a NaN where its mask allows it, or whose largest logit
        there is no finite number, draws NO_TOKEN."""


def select(name: str, device: torch.device, *, batch_invariant: bool = False, graphs: bool = True) -> Ops:
    """The implementation called `name`; auto: triton on a CUDA device; on a CPU cpu where its extension is installed,
    else reference. batch_invariant: only cpu has it; graphs: triton may capture decode steps. Raises ConfigError."""
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
    return "reference"
