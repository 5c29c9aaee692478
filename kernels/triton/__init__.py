"""Triton backend for CUDA devices (TritonOps); tests also run it on CPU tensors under Triton's interpreter.

Importing this package imports Triton; nothing else in the project does. Kernels run on the current CUDA device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvferry.kernels.activation import Activation
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.capabilities import Capabilities
from kvferry.kernels.cuda_graphs import Capture, CudaCapture, GraphStep
from kvferry.kernels.decoder_spec import (
    DecoderForm,
    Experts,
    Gated,
    GroupedGated,
    Latent,
    Stored,
)
from kvferry.kernels.decoder_step import OneByOne, Step
from kvferry.kernels.gate_spec import SILU, Gate
from kvferry.kernels.gpu_weight_layout import form_of_stored, join_forms
from kvferry.kernels.input_staging import Staging
from kvferry.kernels.logit_adjustments import Adjusted
from kvferry.kernels.quantised_cache import PEAKS
from kvferry.kernels.sampling import NoiseKeys
from kvferry.kernels.token_masks import Masks
from kvferry.kernels.torch_operations import TorchShared, grouped_by_torch
from kvferry.kernels.triton import elementwise, rope
from kvferry.kernels.triton.coded_linear import CodedLinear
from kvferry.kernels.triton.decode import decode
from kvferry.kernels.triton.device_features import on_amd
from kvferry.kernels.triton.latent_batch import LatentBatch
from kvferry.kernels.triton.logit_adjustments import Adjuster
from kvferry.kernels.triton.prefill import prefill
from kvferry.kernels.triton.recurrent import TritonRecurrent
from kvferry.kernels.triton.sampling import draw
from kvferry.kernels.triton.split_kv import Division
from kvferry.kernels.triton.tile_sizes import Tile, amd_tile, decode_tile, fills, prefill_tile, spare_parts
from kvferry.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Shape:
    """Facts of a layer that decide its launches. coded: K/V is in 8 bits. amd: the GPU is AMD's."""

    heads: int
    kv_heads: int
    dim: int
    element_bytes: int
    window: int
    coded: bool
    amd: bool


@dataclass(frozen=True, slots=True)
class Launch:
    """Tiles and grid bounds of one batch's attention for one `Shape`. division: of its decodes; None without any."""

    decode_tile: Tile
    division: Division | None
    prefill_tile: Tile
    max_rows: int


def plan_launch(plan: BatchPlan, shape: Shape, processors: int) -> Launch:
    """Plan the launches of a batch and shape. Called once for both; reads only Python ints of the plan."""
    group = shape.heads // shape.kv_heads
    tile = decode_tile(group, shape.dim, shape.element_bytes)
    tile = amd_tile(tile, shape.element_bytes) if shape.amd else tile
    division = None
    if plan.num_decodes:
        total_len = plan.total_len[: plan.num_decodes]
        division = Division(total_len, tile.keys, spare_parts(shape.kv_heads, processors), shape.window)
    max_rows = max(plan.query_lens[plan.num_decodes :], default=0) * group
    tall = not shape.amd and fills(max_rows, shape.kv_heads, processors)
    of_chunks = prefill_tile(max_rows, shape.dim, shape.element_bytes, coded=shape.coded, tall=tall)
    of_chunks = amd_tile(of_chunks, shape.element_bytes) if shape.amd else of_chunks
    return Launch(tile, division, of_chunks, max_rows)


class TritonOps(TritonRecurrent, TorchShared):
    """Implements `kernels.ops.Ops` on Triton kernels, in float32, bfloat16 and float16, accumulating in float32.

    Holds the last batch's launches; not thread-safe. `processors`: multiprocessors to fill; None: those of the device.
    capture: records steps; None: CUDA graphs if there is a device and `graphs`."""

    name = "triton"
    capabilities = Capabilities(codes=True, unit=4)

    def __init__(self, processors: int | None = None, capture: Capture | None = None, *, graphs: bool = True) -> None:
        self._processors = processors
        self._capture = capture or (CudaCapture() if graphs and torch.cuda.is_available() else None)
        self._staging: Staging | None = None
        self._adjusters: dict[int, Adjuster] = {}
        self._batch: object = None
        self._launches: dict[Shape, Launch] = {}
        self._latents: LatentBatch | None = None

    def record(self, form: DecoderForm, one_by_one: OneByOne) -> Step | None:
        """Capture steps of every form, except with experts that run one by one, whose token counts the host reads.

        Steps with chunks are not captured with latent attention, whose form the host chooses by the chunk's length."""
        read = any(isinstance(layer.mlp, Experts) and layer.mlp.grouped is None for layer in form.layers)
        latent = any(isinstance(layer.attention, Latent) for layer in form.layers)
        return None if read or self._capture is None else GraphStep(form, one_by_one, self._capture, chunks=not latent)

    def grouped(self, each: Sequence[Gated | None]) -> GroupedGated | None:
        return grouped_by_torch(each)

    def packed(self, parts: Sequence[Stored], columns: int, bias: torch.Tensor | None = None) -> CodedLinear | None:
        forms = [found for part in parts if (found := form_of_stored(part)) is not None]
        if len(forms) < len(parts):
            return None
        return CodedLinear(join_forms(forms), columns, bias, self._filled(forms[0].codes.device))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return elementwise.rms_norm(x, None, weight, eps)[0]

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return elementwise.rms_norm(x, residual, weight, eps)

    def gate_mul(self, gate_up: torch.Tensor, gate: Gate = SILU) -> torch.Tensor:
        return elementwise.gate_mul(gate_up, gate)

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        return elementwise.activate(x, activation)

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
        return rope.rope_and_cache(q, k, v, cos, sin, kv_layer, plan)

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
        launch = self._launch(q, kv_layer, plan, window)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if launch.division is not None:
            decode(q, kv_layer, out, plan, scale, window, cap, sinks, launch.division, launch.decode_tile)
        if launch.max_rows:
            prefill(q, kv_layer, out, plan, scale, window, cap, sinks, launch.max_rows, launch.prefill_tile)
        return out

    def adjust(self, logits: torch.Tensor, rows: Sequence[Adjusted], drawn: torch.Tensor | None = None) -> None:
        vocab = logits.shape[1]
        if vocab not in self._adjusters:
            self._adjusters[vocab] = Adjuster(logits.device, vocab)
        self._adjusters[vocab](logits, rows, drawn)

    def latent_attention(
        self, q: torch.Tensor, kv_layer: torch.Tensor, plan: BatchPlan, scale: float, own: Latent
    ) -> torch.Tensor:
        if self._latents is None or self._latents.plan is not plan:
            self._latents = LatentBatch(plan, own, q.shape[1], q.element_size(), self._filled(q.device))
        return self._latents.attend(q, kv_layer, scale, own)

    def draw(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], keys: NoiseKeys, masks: Masks = ()
    ) -> torch.Tensor:
        if self._staging is None:
            self._staging = Staging(logits.device)
        return draw(logits, params, keys, masks, self._staging)

    def _launch(self, q: torch.Tensor, kv_layer: torch.Tensor, plan: BatchPlan, window: int) -> Launch:
        if self._batch is not plan.batch:
            self._batch, self._launches = plan.batch, {}
        heads, dim, coded = q.shape[1], q.shape[2], kv_layer.dtype in PEAKS
        shape = Shape(heads, kv_layer.shape[2], dim, q.element_size(), window, coded, on_amd(q.device))
        if shape not in self._launches:
            self._launches[shape] = plan_launch(plan, shape, self._filled(q.device))
        return self._launches[shape]

    def _filled(self, device: torch.device) -> int:
        """Return the number of multiprocessors to fill."""
        if self._processors is None:
            on_gpu = device.type == "cuda"
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1
        return self._processors
