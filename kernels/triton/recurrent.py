"""TritonRecurrent: recurrent layers on the Triton kernels: decodes token by token, prompts in chunks."""

from __future__ import annotations

import torch

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.recurrent_layers import TorchRecurrent, dense_tokens
from kvferry.kernels.triton.causal_conv import causal_conv
from kvferry.kernels.triton.recurrent_chunks import Chunked, chunks
from kvferry.kernels.triton.recurrent_step import delta_steps, scan_steps


class TritonRecurrent(TorchRecurrent):
    """Implements `kernels.recurrent_ops.RecurrentOps`: decodes token by token, prompts in chunks.

    Mamba 1 goes token by token."""

    def causal_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        plan: BatchPlan,
        *,
        silu: bool,
    ) -> torch.Tensor:
        return causal_conv(x, weight, bias, states, plan, silu=silu)

    def gated_delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        states: torch.Tensor,
        plan: BatchPlan,
    ) -> torch.Tensor:
        q, k, v, decay, beta = map(dense_tokens, (q, k, v, decay, beta))
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        if plan.num_decodes:
            delta_steps(q, k, v, decay, beta, states, plan, plan.num_decodes, out)
        if plan.num_decodes < plan.num_seqs:
            chunks(Chunked(k, q, v, decay, beta, None, None, states), plan, plan.num_decodes, out)
        return out

    def state_space_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor | None,
        states: torch.Tensor,
        plan: BatchPlan,
    ) -> torch.Tensor:
        x, dt, b, c = map(dense_tokens, (x, dt, b, c))
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        steps = plan.num_decodes if a.dim() == 1 and x.shape[2] > 1 else plan.num_seqs
        if steps:
            scan_steps(x, dt, a.contiguous(), b, c, d, states, plan, steps, out)
        if steps < plan.num_seqs:
            chunks(Chunked(b, c, x, dt, None, a, d, states), plan, steps, out)
        return out
