"""Subjects of the GPU kernel benchmark: recurrent layers at the sizes of real models."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from benchmarks.gpu_subject import Shape, Subject, layers_for, paged_plan
from kvferry.kernels.ops import Ops
from kvferry.kernels.sequence_state import SequenceStates

KINDS = {
    "delta rule": ("gated_delta_rule", (32, 128, 128)),
    "scan": ("state_space_scan", (48, 64, 128)),
    "convolution": ("causal_conv", (8192, 3)),
}
"""Operation and state of a layer of Qwen3.5 and of Granite 4: heads and their dims, or channels and tokens."""
OF_TOKENS = {"delta rule": (0, 1, 2, 3, 4), "scan": (0, 1, 3, 4), "convolution": (0,)}
"""Tensors of an operation that have a row for each token."""
PROMPTS = ((1, 512), (8, 512))
"""Sequences and tokens of each."""


def recurrent_layer(ops: Ops, shape: Shape, kind: str, seqs: int, query_len: int) -> Subject:
    """Return a recurrent layer of equal sequences. The peer computes all of them token by token in plain PyTorch."""
    operation, inner = KINDS[kind]
    inputs, options, work = _inputs(kind, seqs * query_len, inner, shape)
    size = math.prod(inner)
    moved = 8 * size * seqs + sum(each.numel() * each.element_size() for each in inputs)
    layers = layers_for(moved) if query_len == 1 else 1
    rows = torch.randn(2 * seqs, layers * size, device=shape.device) * 0.1
    numbers = torch.arange(2 * seqs, device=shape.device)
    plan, _ = paged_plan([query_len] * seqs, [query_len] * seqs, shape)
    plan = replace(plan, states=SequenceStates(rows, numbers[:seqs], numbers[seqs:]))
    states = [rows[:, i * size : (i + 1) * size].view(2 * seqs, *inner) for i in range(layers)]

    def ours(layer: int) -> torch.Tensor:
        found: torch.Tensor = getattr(ops, operation)(*inputs, states[layer], plan, **options)
        return found

    def peer(layer: int) -> torch.Tensor:
        state, found = states[layer][:seqs], []
        for at in range(query_len):
            now = [x[at::query_len] if index in OF_TOKENS[kind] else x for index, x in enumerate(inputs)]
            out, state = STEPS[kind](now, state)
            found.append(out)
        states[layer][seqs:] = state
        return torch.stack(found, 1).flatten(0, 1).to(shape.dtype)

    return Subject(f"{kind} {seqs} x {query_len}", ours, peer, layers, moved, work)


Stepped = tuple[torch.Tensor, torch.Tensor]
"""What a token of each sequence gives, and the states after it."""


def _delta_step(inputs: list[torch.Tensor], state: torch.Tensor) -> Stepped:
    q, k, v, decay, beta = inputs
    shared = v.shape[1] // k.shape[1]
    q, k = (F.normalize(each.float(), dim=2).repeat_interleave(shared, 1) for each in (q, k))
    state = state * decay.exp()[..., None, None]
    change = (v - torch.einsum("shkv,shk->shv", state, k)) * beta[..., None]
    state = state + torch.einsum("shk,shv->shkv", k, change)
    return torch.einsum("shkv,shk->shv", state, q) * q.shape[2] ** -0.5, state


def _scan_step(inputs: list[torch.Tensor], state: torch.Tensor) -> Stepped:
    x, dt, a, b, c, d = inputs
    into, back = (each.float().repeat_interleave(x.shape[1] // each.shape[1], 1) for each in (b, c))
    state = state * (dt * a).exp()[..., None, None] + (dt[..., None] * x)[..., None] * into[:, :, None]
    return torch.einsum("shdn,shn->shd", state, back) + d[:, None] * x, state


def _convolution_step(inputs: list[torch.Tensor], state: torch.Tensor) -> Stepped:
    x, weight, bias = inputs
    seen = torch.cat((state, x.float()[..., None]), 2)
    return F.silu((seen * weight.float()).sum(2) + bias), seen[..., 1:]


STEPS = {"delta rule": _delta_step, "scan": _scan_step, "convolution": _convolution_step}


def _inputs(
    kind: str, tokens: int, inner: tuple[int, ...], shape: Shape
) -> tuple[tuple[torch.Tensor, ...], dict[str, bool], int]:
    """Return the operation's tensors, its options and floating point operations token by token."""

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=shape.dtype, device=shape.device)

    if kind == "convolution":
        channels, kept = inner
        weights = random(channels, kept + 1), random(channels)
        return (random(tokens, channels), *weights), {"silu": True}, 2 * tokens * channels * (kept + 1)
    heads, first, second = inner
    positive = torch.rand(tokens, heads, device=shape.device)
    if kind == "delta rule":
        keys = random(tokens, heads // 2, first), random(tokens, heads // 2, first)
        return (*keys, random(tokens, heads, second), -positive, positive), {}, 6 * tokens * heads * first * second
    own = torch.rand(heads, device=shape.device)
    pair = random(tokens, 1, second), random(tokens, 1, second)
    return (random(tokens, heads, first), positive, -own, *pair, own), {}, 4 * tokens * heads * first * second
