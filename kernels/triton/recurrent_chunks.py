# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Triton kernel for recurrent layers (gated delta rule, Mamba 2) of prompts, in chunks of tokens by matrix products.

The gated delta rule (Yang et al. 2024, section 3) and the state-space scan (Dao and Gu 2024, section 6) are one
recurrence, as `cpu/native/chunked.h` says: keys, queries, and changes of the state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.recurrent_layers import L2_EPS
from kvferry.kernels.triton.causal_conv import begins_chain, continues_chain
from kvferry.kernels.triton.device_features import precision_of
from kvferry.kernels.triton.tile_sizes import power_of_two

TOKENS = 32
"""Tokens of a chunk."""
COLUMNS = 32
"""Columns of a head's state in a program."""
FORGOTTEN = tl.constexpr(-128.0)
"""Logarithm of a decay: all below is 0 in float32."""


@triton.jit
def load_vectors(of, at, stride, inside, dims, DIM: tl.constexpr, UNIT: tl.constexpr, EPS: tl.constexpr):
    """Return the tokens' vectors [TOKENS, BLOCK_K] in float32; UNIT: of length one."""
    place = of + at[:, None] * stride + dims[None, :]
    value = tl.load(place, mask=inside[:, None] & (dims < DIM)[None, :], other=0.0).to(tl.float32)
    if UNIT:
        value *= tl.rsqrt(tl.sum(value * value, 1) + EPS)[:, None]
    return value


@triton.jit
def solved(changes, own, TOKENS: tl.constexpr):
    """Return the changes d with d_t = changes_t - sum over s < t of own[t, s] d_s, from the first to the last."""
    token = tl.arange(0, TOKENS)
    for t in range(1, TOKENS):
        row = tl.sum(tl.where((token == t)[:, None], own, 0.0), 0)
        change = tl.sum(row[:, None] * changes, 0)
        changes -= tl.where((token == t)[:, None], change[None, :], 0.0)
    return changes


@triton.jit(do_not_specialize=["seqs", "skipped"])
def chunks_kernel(
    keys,  # [T, key heads, K]
    queries,
    values,  # [T, heads, V]
    logs,  # float32 [T, heads], logarithms of decays; of a scan times `rates`
    beta,
    rates,  # of a scan, [heads]
    direct,
    states,
    out,
    query_start,
    before,
    after,
    seqs,
    skipped,
    stride_keys,
    stride_queries,
    stride_values,
    stride_logs,
    stride_beta,
    stride_states,
    stride_row,  # of the state, between keys' dims
    stride_column,
    scale,
    heads,
    shared,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TOKENS: tl.constexpr,
    SOLVE: tl.constexpr,
    DIRECT: tl.constexpr,
    EPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (sequence, head, columns): compute it and the sequences that continue it. SOLVE: the delta rule."""
    seq, head = tl.program_id(0) + skipped, tl.program_id(1)
    if not begins_chain(before, after, seq, skipped):
        return
    rows, columns = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    token = tl.arange(0, TOKENS)
    place = head.to(tl.int64) * K * V + rows[:, None] * stride_row + columns[None, :] * stride_column
    first = tl.load(before + seq)
    there = (rows < tl.where(first >= 0, K, 0))[:, None] & (columns < V)[None, :]
    state = tl.load(states + first * stride_states + place, mask=there, other=0.0)
    rate = 1.0 if SOLVE else tl.load(rates + head)
    more = True
    while more:
        start, end = tl.load(query_start + seq).to(tl.int64), tl.load(query_start + seq + 1).to(tl.int64)
        for begin in range(start, end, TOKENS):
            at = begin + token
            inside = at < end
            key = load_vectors(keys + head // shared * K, at, stride_keys, inside, rows, K, SOLVE, EPS)
            query = load_vectors(queries + head // shared * K, at, stride_queries, inside, rows, K, SOLVE, EPS) * scale
            shown = inside[:, None] & (columns < V)[None, :]
            own = values + at[:, None] * stride_values + head * V + columns[None, :]
            value = tl.load(own, mask=shown, other=0.0).to(tl.float32)
            step = tl.load(logs + at * stride_logs + head, mask=inside, other=0.0)
            # In double, so that a token that forgets everything leaves those after it exact.
            log = tl.cumsum(tl.maximum(step * rate, FORGOTTEN).to(tl.float64), 0)
            total = tl.sum(tl.maximum(step * rate, FORGOTTEN).to(tl.float64), 0)
            gained, left = tl.exp(log.to(tl.float32)), tl.exp((total - log).to(tl.float32))
            quotient = (log[:, None] - log[None, :]).to(tl.float32)
            seen = token[:, None] >= token[None, :]
            share = tl.where(seen, tl.exp(tl.where(seen, quotient, 0.0)), 0.0)
            across = tl.trans(key)
            if SOLVE:
                by = tl.load(beta + at * stride_beta + head, mask=inside, other=0.0)
                known = tl.dot(key, state, input_precision=PRECISION)
                changes = (value - known * gained[:, None]) * by[:, None]
                earlier = tl.where(token[:, None] > token[None, :], share, 0.0) * by[:, None]
                changes = solved(changes, tl.dot(key, across, input_precision=PRECISION) * earlier, TOKENS)
            else:
                changes = value * step[:, None]
            mixed = tl.dot(query, across, input_precision=PRECISION) * share
            found = tl.dot(query, state, input_precision=PRECISION) * gained[:, None]
            found = tl.dot(mixed, changes, found, input_precision=PRECISION)
            if DIRECT:
                found += tl.load(direct + head) * value
            given = out + (at * heads + head)[:, None] * V + columns[None, :]
            tl.store(given, found.to(out.dtype.element_ty), mask=shown)
            state = state * tl.exp(total.to(tl.float32))
            state = tl.dot(across, changes * left[:, None], state, input_precision=PRECISION)
        last = tl.load(after + seq)
        there = (rows < tl.where(last >= 0, K, 0))[:, None] & (columns < V)[None, :]
        tl.store(states + last * stride_states + place, state, mask=there)
        more = continues_chain(before, after, seq, seqs)
        seq += 1


@dataclass(frozen=True, slots=True)
class Chunked:
    """Inputs of a layer's chunks. Tensors are dense after their tokens.

    keys, queries: [T, key heads, K], each serving heads / key heads neighbours of values [T, heads, V]. logs: float32
    [T, heads]. A scan has rates [heads], `direct` [heads] or None, and states [rows, heads, V, K]; the delta rule has
    beta [T, heads] and states [rows, heads, K, V]."""

    keys: torch.Tensor
    queries: torch.Tensor
    values: torch.Tensor
    logs: torch.Tensor
    beta: torch.Tensor | None
    rates: torch.Tensor | None
    direct: torch.Tensor | None
    states: torch.Tensor


def chunks(layer: Chunked, plan: BatchPlan, skipped: int, out: torch.Tensor) -> None:
    """Compute the plan's sequences, except the first `skipped`."""
    assert plan.states is not None, "a batch of a recurrent model needs states"
    keys, values, solve = layer.keys, layer.values, layer.beta is not None
    (heads, v_dim), k_dim, logs = values.shape[1:], keys.shape[2], layer.logs
    columns = min(COLUMNS, power_of_two(v_dim, 16))
    beta, rates = (logs if each is None else each for each in (layer.beta, layer.rates))
    chunks_kernel[(plan.num_seqs - skipped, heads, triton.cdiv(v_dim, columns))](
        keys, layer.queries, values, logs, beta, rates, rates if layer.direct is None else layer.direct,
        layer.states, out, plan.query_start, plan.states.before, plan.states.after, plan.num_seqs, skipped,
        keys.stride(0), layer.queries.stride(0), values.stride(0), logs.stride(0), beta.stride(0),
        layer.states.stride(0), *((v_dim, 1) if solve else (1, k_dim)),
        k_dim**-0.5 if solve else 1.0, heads, heads // keys.shape[1],
        K=k_dim, V=v_dim, BLOCK_K=power_of_two(k_dim, 16), BLOCK_V=columns, TOKENS=TOKENS, SOLVE=solve,
        DIRECT=layer.direct is not None, EPS=L2_EPS,
        PRECISION=precision_of(values),
    )  # fmt: skip
