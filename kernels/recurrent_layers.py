"""TorchRecurrent: recurrent layers in plain PyTorch, token by token; the reference that other backends must match."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.mixer_gates import TorchMixerGates
from kvferry.kernels.sequence_state import SequenceStates

L2_EPS = 1e-6
"""Added to the sum of squares by which queries and keys of the delta rule are normalised."""


class TorchRecurrent(TorchMixerGates):
    """Implements `kernels.recurrent_ops.RecurrentOps` on any device."""

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
        out, width = torch.empty_like(x), weight.shape[1]
        for tokens, window, keep in _sequences(states, plan):
            seen = torch.cat((window, x[tokens].float().t()), 1)
            summed = F.conv1d(
                seen[None], weight.float()[:, None], None if bias is None else bias.float(), 1, 0, 1, len(x[0])
            )
            out[tokens] = (F.silu(summed) if silu else summed)[0].t().to(x.dtype)
            keep(seen[:, seen.shape[1] - width + 1 :])
        return out

    def gated_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        plan: BatchPlan,
    ) -> torch.Tensor:
        before, behind, value = x.chunk(3, 1)
        return behind * self.causal_conv(before * value, weight, bias, states, plan, silu=False)

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
        out, shared = torch.empty_like(v), v.shape[1] // k.shape[1]
        queries, keys = (_unit(each).repeat_interleave(shared, 1) for each in (q, k))
        queries, values, factors = queries * q.shape[2] ** -0.5, v.float(), decay.exp()
        for tokens, state, keep in _sequences(states, plan):
            for at in range(tokens.start, tokens.stop):
                key = keys[at].unsqueeze(2)
                state = state * factors[at, :, None, None]
                change = (values[at] - (state * key).sum(1)) * beta[at, :, None]
                state = state + key * change.unsqueeze(1)
                out[at] = (state * queries[at].unsqueeze(2)).sum(1).to(v.dtype)
            keep(state)
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
        out, shared = torch.empty_like(x), x.shape[1] // b.shape[1]
        inputs = x.float()
        rates = a[:, None, None] if a.dim() == 1 else a[:, None, :]
        for tokens, state, keep in _sequences(states, plan):
            for at in range(tokens.start, tokens.stop):
                step = dt[at, :, None, None]
                ins, outs = (each[at].float().repeat_interleave(shared, 0).unsqueeze(1) for each in (b, c))
                state = state * (step * rates).exp() + step * inputs[at].unsqueeze(2) * ins
                found = (state * outs).sum(2)
                out[at] = (found if d is None else found + d[:, None] * inputs[at]).to(x.dtype)
            keep(state)
        return out


def dense_tokens(x: torch.Tensor) -> torch.Tensor:
    """Return x [T, ...] with each token's numbers dense in memory: x itself if they are."""
    if x.is_contiguous():
        return x
    size = 1
    for length, step in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if length != 1 and step != size:
            return x.contiguous()
        size *= length
    return x


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Return the vectors of the last dimension with length one, in float32."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def _sequences(
    states: torch.Tensor, plan: BatchPlan
) -> Iterator[tuple[slice, torch.Tensor, Callable[[torch.Tensor], None]]]:
    """Yield each sequence's query tokens, its state before them, and what stores the state after them."""
    assert plan.states is not None, "a batch of a recurrent model needs states"
    own: SequenceStates = plan.states
    start = 0
    for count, before, after in zip(plan.query_lens, own.before.tolist(), own.after.tolist(), strict=True):

        def keep(state: torch.Tensor, row: int = after) -> None:
            if row >= 0:
                states[row].copy_(state)

        yield slice(start, start + count), states[before] if before >= 0 else torch.zeros_like(states[0]), keep
        start += count
