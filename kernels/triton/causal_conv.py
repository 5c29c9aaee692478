# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Triton kernel for the causal depthwise convolution of recurrent layers, over prompts and decodes."""

import torch
import triton
import triton.language as tl

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.triton.tile_sizes import power_of_two

CHANNELS, TOKENS = 64, 32
"""Channels of a program, and tokens that it computes at once."""


@triton.jit
def begins_chain(before, after, seq, first_seq):
    """Return whether a sequence does not continue the state of the one before it; first_seq: the first one."""
    row = tl.load(before + seq)
    left = tl.load(after + seq - 1, mask=seq > first_seq, other=-2)
    return (row < 0) | (row != left)


@triton.jit
def continues_chain(before, after, seq, seqs):
    """Return whether the next sequence begins with the state that this one leaves."""
    row = tl.load(before + seq + 1, mask=seq + 1 < seqs, other=-1)
    return (row >= 0) & (row == tl.load(after + seq))


@triton.jit(do_not_specialize=["seqs"])
def causal_conv_kernel(
    x,  # [T, channels], channels dense
    weight,  # [channels, WIDTH]
    bias,
    states,  # float32 [rows, channels, WIDTH - 1], dense after the rows
    out,
    query_start,
    before,
    after,
    seqs,
    channels,
    stride_x,
    stride_states,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Program (sequence, channels): convolve it and the sequences that continue it. KEPT: WIDTH as a power of two."""
    seq = tl.program_id(0)
    if not begins_chain(before, after, seq, 0):
        return
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    live = channel < channels
    own_bias = tl.load(bias + channel, mask=live, other=0.0).to(tl.float32) if BIAS else 0.0
    more = True
    while more:
        start = tl.load(query_start + seq).to(tl.int64)
        count = (tl.load(query_start + seq + 1) - start).to(tl.int32)
        first, last = tl.load(before + seq), tl.load(after + seq)
        oldest = tl.where(first >= 0, 1 - WIDTH, 0)  # of the tokens before the first, the first that a state has
        old = states + first * stride_states + channel * (WIDTH - 1)
        for begin in range(0, count, TOKENS):
            token = begin + tl.arange(0, TOKENS)
            total = tl.zeros([TOKENS, CHANNELS], dtype=tl.float32) + own_bias
            for tap in tl.static_range(WIDTH):
                at = token + tap - (WIDTH - 1)
                inside = live[None, :] & ((at >= 0) & (token < count))[:, None]
                place = x + (start + at)[:, None] * stride_x + channel[None, :]
                value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
                earlier = live[None, :] & ((at < 0) & (at >= oldest))[:, None]
                value += tl.load(old[None, :] + (at + WIDTH - 1)[:, None], mask=earlier, other=0.0)
                gain = tl.load(weight + channel * WIDTH + tap, mask=live, other=0.0).to(tl.float32)
                total += value * gain[None, :]
            if SILU:
                total = total / (1.0 + tl.exp(-total))
            place = out + (start + token)[:, None] * channels + channel[None, :]
            tl.store(place, total.to(out.dtype.element_ty), mask=live[None, :] & (token < count)[:, None])
        if last >= 0:
            tap = tl.arange(0, KEPT)
            at = count - (WIDTH - 1) + tap
            kept = live[None, :] & (tap < WIDTH - 1)[:, None]
            place = x + (start + at)[:, None] * stride_x + channel[None, :]
            value = tl.load(place, mask=kept & (at >= 0)[:, None], other=0.0).to(tl.float32)
            earlier = kept & ((at < 0) & (at >= oldest))[:, None]
            value += tl.load(old[None, :] + (at + WIDTH - 1)[:, None], mask=earlier, other=0.0)
            tl.store(states + last * stride_states + channel[None, :] * (WIDTH - 1) + tap[:, None], value, mask=kept)
        more = continues_chain(before, after, seq, seqs)
        seq += 1
        tl.debug_barrier()


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    plan: BatchPlan,
    *,
    silu: bool,
) -> torch.Tensor:
    """Implement `kernels.recurrent_ops.RecurrentOps.causal_conv`."""
    assert plan.states is not None, "a batch of a recurrent model needs states"
    channels, width = weight.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens = min(TOKENS, power_of_two(max(plan.query_lens)))
    causal_conv_kernel[(plan.num_seqs, triton.cdiv(channels, CHANNELS))](
        x, weight.contiguous(), weight if bias is None else bias, states, out,
        plan.query_start, plan.states.before, plan.states.after,
        plan.num_seqs, channels, x.stride(0), states.stride(0),
        WIDTH=width, KEPT=power_of_two(width), BIAS=bias is not None, SILU=silu, CHANNELS=CHANNELS, TOKENS=tokens,
    )  # fmt: skip
    return out
