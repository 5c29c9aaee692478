"""CpuOps: the CPU backend's implementation of Ops: attention, norms, activations, sampling on the compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvferry.kernels.activation import KINDS, Activation
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.capabilities import Capabilities
from kvferry.kernels.cpu import latent
from kvferry.kernels.cpu.extension import extension, instruction_set
from kvferry.kernels.cpu.packed_layers import PackedLayers
from kvferry.kernels.cpu.recurrent import CpuRecurrent
from kvferry.kernels.cpu.step import CpuStep, record
from kvferry.kernels.decoder_spec import DecoderForm, Latent
from kvferry.kernels.decoder_step import OneByOne
from kvferry.kernels.gate_spec import SILU, Gate
from kvferry.kernels.gumbel_noise import row_key
from kvferry.kernels.latent import absorbed
from kvferry.kernels.layer_norm import LayerNorm
from kvferry.kernels.quantised_cache import FP8
from kvferry.kernels.reference import ReferenceOps
from kvferry.kernels.sampling import NoiseKeys, is_greedy
from kvferry.kernels.token_masks import Masks
from kvferry.kernels.torch_operations import TorchShared
from kvferry.protocol.sampling import SamplingParams

_DTYPES = (torch.float32, torch.bfloat16)
_UNIT = 16
_PREFILL_UNIT = 32
_MAX_HEAD_DIM = 576
Scoring = tuple[float, int, float, torch.Tensor | None]
"""Scale, window, cap and sinks of `Ops.paged_attention`."""


class CpuOps(CpuRecurrent, PackedLayers, TorchShared):
    """Implements `kernels.ops.Ops` on the compiled kernels in float32 and bfloat16.

    Owns a team of threads; not thread-safe.

    The reference serves float16, fp8 caches and attention with head dims that are not multiples of 16. It also serves
    prefill attention in float32, or if head dims, or the parts of latent attention, are not multiples of 32.

    threads: None means PyTorch's number. name: an instruction set; None means the best. batch_invariant: a
    token's attention has the same bits in a decode step as in a chunk of its prompt, for bfloat16 and head dims that
    are multiples of 32; decode steps take longer. Raises RuntimeError without the extension, ValueError if this
    processor does not run the set."""

    name = "cpu"
    capabilities = Capabilities(codes=True)

    def __init__(self, threads: int | None = None, name: str | None = None, *, batch_invariant: bool = False) -> None:
        native = extension()
        if native is None:
            raise RuntimeError("kvferry was installed without its CPU extension")
        kernels = native.Kernels(name or instruction_set(), threads or torch.get_num_threads())
        super().__init__(kernels, native.row_bytes)
        self._step_types = native.Step, native.Mixer
        self._reference, self._of_prefills = ReferenceOps(), ReferenceOps()
        self._batch_invariant = batch_invariant
        self._prefills: tuple[BatchPlan, BatchPlan] | None = None

    @property
    def instruction_set(self) -> str:
        found: str = self.kernels.instruction_set
        return found

    @property
    def threads(self) -> int:
        """Number of threads of the team."""
        found: int = self.kernels.threads
        return found

    def record(self, form: DecoderForm, one_by_one: OneByOne) -> CpuStep | None:
        return record(*self._step_types, self.kernels, form, self._batch_invariant)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.dtype not in _DTYPES:
            return self._reference.rms_norm(x, weight, eps)
        x = x if x.dim() == 2 and x.stride(-1) == 1 else x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        self.kernels.rms_norm(x, None, weight, out, None, eps)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if x.dtype not in _DTYPES:
            return self._reference.add_rms_norm(x, residual, weight, eps)
        x = x.contiguous()
        out, total = torch.empty_like(x), torch.empty_like(x)
        self.kernels.rms_norm(x, residual.contiguous(), weight, out, total, eps)
        return out, total

    def gate_mul(self, gate_up: torch.Tensor, gate: Gate = SILU) -> torch.Tensor:
        if gate_up.dtype not in _DTYPES:
            return self._reference.gate_mul(gate_up, gate)
        out = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype)
        self.kernels.gate_mul(gate_up, out, gate.slope, gate.cubic, gate.limit, gate.offset)
        return out

    def layer_norm(self, x: torch.Tensor, norm: LayerNorm, eps: float) -> torch.Tensor:
        if x.dtype not in _DTYPES or x.dim() != 2 or norm.weight.dim() != 1:
            return super().layer_norm(x, norm, eps)
        x = x if x.stride(-1) == 1 else x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        self.kernels.layer_norm(x, norm.weight, norm.bias, out, eps)
        return out

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        if x.dtype not in _DTYPES:
            return super().activate(x, activation)
        x, own = x.contiguous(), activation
        out = torch.empty_like(x)
        self.kernels.activate(x, out, KINDS.index(own.kind), own.positive, own.negative, own.beta, own.bound)
        return out

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
        if not _native(q, kv_layer) or q.shape[2] > _MAX_HEAD_DIM or (k is not None and v is None):
            return self._reference.rope_and_cache(q, k, v, cos, sin, kv_layer, plan)
        slots = plan.slots
        if k is None or v is None:
            k = v = q[:, : kv_layer.shape[2]]
            slots = torch.full_like(slots, -1)
        q, k, v = (part if part.stride()[1:] == (part.shape[2], 1) else part.contiguous() for part in (q, k, v))
        out = torch.empty(q.shape, dtype=q.dtype)
        self.kernels.rope_and_cache(q, k, v, cos, sin, kv_layer, plan.positions, slots, out)
        return out

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
        dim, decodes = q.shape[2], plan.num_decodes
        if not _native(q, kv_layer) or dim % _UNIT or dim > _MAX_HEAD_DIM:
            return self._reference.paged_attention(q, kv_layer, plan, scale, window, cap, sinks)
        q, out = q.contiguous(), torch.empty(q.shape, dtype=q.dtype)
        if decodes:
            self._decode(q, kv_layer, plan, (scale, window, cap, sinks), out)
        if decodes == plan.num_seqs:
            return out
        if q.dtype == torch.bfloat16 and dim % _PREFILL_UNIT == 0:
            self._prefill(q, kv_layer, plan, (scale, window, cap, sinks), out)
        else:
            rest = self._prefill_part(plan)
            out[decodes:] = self._of_prefills.paged_attention(q[decodes:], kv_layer, rest, scale, window, cap, sinks)
        return out

    def latent_attention(
        self, q: torch.Tensor, kv_layer: torch.Tensor, plan: BatchPlan, scale: float, own: Latent
    ) -> torch.Tensor:
        dim, decodes = own.rotated + own.rank, plan.num_decodes
        if not _native(q, kv_layer) or own.rotated % _UNIT or own.rank % _UNIT or dim > _MAX_HEAD_DIM:
            return self._reference.latent_attention(q, kv_layer, plan, scale, own)
        q, out = q.contiguous(), torch.empty(*q.shape[:2], own.value, dtype=q.dtype)
        if decodes:
            queries = absorbed(q[:decodes], own)
            summed = torch.empty(*queries.shape[:2], own.rank, dtype=q.dtype)
            self._decode(queries, kv_layer, plan, (scale, 0, 0.0, None), summed)
            out[:decodes] = own.up_v(summed)
        if decodes == plan.num_seqs:
            return out
        if latent.native(q, own):
            latent.attend_prompts(self.kernels, q, kv_layer, plan, scale, own, out)
        else:
            rest = self._prefill_part(plan)
            out[decodes:] = self._of_prefills.latent_attention(q[decodes:], kv_layer, rest, scale, own)
        return out

    def draw(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], keys: NoiseKeys, masks: Masks = ()
    ) -> torch.Tensor:
        count, vocab_size = logits.shape
        rows = [
            (0.0, 0.0, vocab_size, 1.0, 0)
            if is_greedy(p)
            else (
                p.temperature,
                p.min_p,
                p.top_k if 0 < p.top_k < vocab_size else vocab_size,
                p.top_p,
                row_key(seed, at),
            )
            for p, seed, at in zip(params, keys.seeds, keys.positions, strict=True)
        ]
        out = torch.empty(count, dtype=torch.int64)
        self.kernels.draw(logits.contiguous(), rows, masks, out)
        return out

    def _decode(
        self, q: torch.Tensor, kv_layer: torch.Tensor, plan: BatchPlan, scoring: Scoring, out: torch.Tensor
    ) -> None:
        whole = q.shape[2] % _PREFILL_UNIT == 0 and out.shape[2] % _PREFILL_UNIT == 0
        blocks = self._batch_invariant and q.dtype == torch.bfloat16 and whole
        table, lens, count = plan.block_table, plan.total_len, plan.num_decodes
        self.kernels.decode(q, kv_layer, table, lens, count, *scoring, blocks, out)

    def _prefill(
        self, q: torch.Tensor, kv_layer: torch.Tensor, plan: BatchPlan, scoring: Scoring, out: torch.Tensor
    ) -> None:
        start = plan.num_decodes
        for seq in range(plan.num_decodes, plan.num_seqs):
            end = start + plan.query_lens[seq]
            blocks, total_len = plan.block_table[seq], plan.total_lens[seq]
            until = None if plan.see_until is None else plan.see_until[start:end]
            self.kernels.prefill(q[start:end], kv_layer, blocks, total_len, *scoring, until, out[start:end])
            start = end

    def _prefill_part(self, plan: BatchPlan) -> BatchPlan:
        """Return the plan without its decodes, made once per batch."""
        if self._prefills is None or self._prefills[0] is not plan:
            count = plan.num_decodes
            rest = replace(
                plan,
                positions=plan.positions[count:],
                slots=plan.slots[count:],
                block_table=plan.block_table[count:],
                query_start=plan.query_start[count:] - count,
                total_len=plan.total_len[count:],
                see_until=None if plan.see_until is None else plan.see_until[count:],
                query_lens=plan.query_lens[count:],
                total_lens=plan.total_lens[count:],
                num_decodes=0,
            )
            self._prefills = (plan, rest)
        return self._prefills[1]


def _native(q: torch.Tensor, kv_layer: torch.Tensor) -> bool:
    """Return whether the compiled kernels have formats for both."""
    return q.dtype in _DTYPES and kv_layer.dtype != FP8
