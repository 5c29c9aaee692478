# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Triton kernels for recurrent layers token by token: for decodes, and for Mamba 1's prompts."""

import torch
import triton
import triton.language as tl

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.recurrent_layers import L2_EPS
from kvferry.kernels.triton.causal_conv import begins_chain, continues_chain
from kvferry.kernels.triton.tile_sizes import power_of_two

COLUMNS = 32
"""Columns of a head's state in a program of the delta rule."""
STATE = 4096
"""Numbers of the state in a program of the scan."""


@triton.jit
def unit(vector, EPS: tl.constexpr):
    """Return the vector with length one."""
    return vector * tl.rsqrt(tl.sum(vector * vector, 0) + EPS)


@triton.jit(do_not_specialize=["seqs"])
def delta_step_kernel(
    q,
    k,
    v,
    decay,
    beta,
    states,
    out,
    query_start,
    before,
    after,
    seqs,
    stride_q,
    stride_k,
    stride_v,
    stride_decay,
    stride_beta,
    stride_states,
    scale,
    heads,
    shared,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EPS: tl.constexpr,
):
    """Program (sequence, head, columns): compute it and the sequences that continue it."""
    seq, head = tl.program_id(0), tl.program_id(1)
    if not begins_chain(before, after, seq, 0):
        return
    rows, columns = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    shown = (columns < V)[None, :]
    place = head.to(tl.int64) * K * V + rows[:, None] * V + columns[None, :]
    first = tl.load(before + seq)
    there = (rows < tl.where(first >= 0, K, 0))[:, None] & shown
    state = tl.load(states + first * stride_states + place, mask=there, other=0.0)
    more = True
    while more:
        start, end = tl.load(query_start + seq).to(tl.int64), tl.load(query_start + seq + 1).to(tl.int64)
        for at in range(start, end):
            key = tl.load(k + at * stride_k + head // shared * K + rows, mask=rows < K, other=0.0).to(tl.float32)
            query = tl.load(q + at * stride_q + head // shared * K + rows, mask=rows < K, other=0.0).to(tl.float32)
            key, query = unit(key, EPS), unit(query, EPS) * scale
            value = tl.load(v + at * stride_v + head * V + columns, mask=columns < V, other=0.0).to(tl.float32)
            state *= tl.exp(tl.load(decay + at * stride_decay + head))
            change = (value - tl.sum(state * key[:, None], 0)) * tl.load(beta + at * stride_beta + head)
            state += key[:, None] * change[None, :]
            found = tl.sum(state * query[:, None], 0)
            tl.store(out + (at * heads + head) * V + columns, found.to(out.dtype.element_ty), mask=columns < V)
        last = tl.load(after + seq)
        there = (rows < tl.where(last >= 0, K, 0))[:, None] & shown
        tl.store(states + last * stride_states + place, state, mask=there)
        more = continues_chain(before, after, seq, seqs)
        seq += 1


@triton.jit(do_not_specialize=["seqs"])
def scan_step_kernel(
    x,
    dt,
    a,
    b,
    c,
    d,
    states,
    out,
    query_start,
    before,
    after,
    seqs,
    stride_x,
    stride_dt,
    stride_b,
    stride_c,
    stride_states,
    heads,
    of_group,
    DIM: tl.constexpr,
    N: tl.constexpr,
    EACH: tl.constexpr,
    DIRECT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (sequence, group, rows): a row is one dimension of one head; a group has `of_group` rows."""
    seq, group = tl.program_id(0), tl.program_id(1)
    if not begins_chain(before, after, seq, 0):
        return
    inner, numbers = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_N)
    there, whole = inner < of_group, numbers < N
    row = group.to(tl.int64) * of_group + inner
    head, live = row // DIM, there[:, None] & whole[None, :]
    if EACH:
        rates = tl.load(a + head[:, None] * N + numbers[None, :], mask=live, other=0.0)
    else:
        rates = tl.load(a + head, mask=there, other=0.0)[:, None]
    place = row[:, None] * N + numbers[None, :]
    first = tl.load(before + seq)
    held = there[:, None] & (numbers < tl.where(first >= 0, N, 0))[None, :]
    state = tl.load(states + first * stride_states + place, mask=held, other=0.0)
    more = True
    while more:
        start, end = tl.load(query_start + seq).to(tl.int64), tl.load(query_start + seq + 1).to(tl.int64)
        for at in range(start, end):
            step = tl.load(dt + at * stride_dt + head, mask=there, other=0.0)
            own = tl.load(x + at * stride_x + row, mask=there, other=0.0).to(tl.float32)
            into = tl.load(b + at * stride_b + group * N + numbers, mask=whole, other=0.0).to(tl.float32)
            back = tl.load(c + at * stride_c + group * N + numbers, mask=whole, other=0.0).to(tl.float32)
            state = state * tl.exp(step[:, None] * rates) + (step * own)[:, None] * into[None, :]
            found = tl.sum(state * back[None, :], 1)
            if DIRECT:
                found += tl.load(d + head, mask=there, other=0.0) * own
            tl.store(out + at * heads * DIM + row, found.to(out.dtype.element_ty), mask=there)
        last = tl.load(after + seq)
        held = there[:, None] & (numbers < tl.where(last >= 0, N, 0))[None, :]
        tl.store(states + last * stride_states + place, state, mask=held)
        more = continues_chain(before, after, seq, seqs)
        seq += 1


def delta_steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    plan: BatchPlan,
    seqs: int,
    out: torch.Tensor,
) -> None:
    """Compute the first `seqs` sequences of the plan. Tensors are dense after their tokens."""
    assert plan.states is not None, "a batch of a recurrent model needs states"
    heads, k_dim, v_dim = v.shape[1], k.shape[2], v.shape[2]
    columns = min(COLUMNS, power_of_two(v_dim))
    delta_step_kernel[(seqs, heads, triton.cdiv(v_dim, columns))](
        q, k, v, decay, beta, states, out, plan.query_start, plan.states.before, plan.states.after, seqs,
        q.stride(0), k.stride(0), v.stride(0), decay.stride(0), beta.stride(0), states.stride(0),
        k_dim**-0.5, heads, heads // k.shape[1],
        K=k_dim, V=v_dim, BLOCK_K=power_of_two(k_dim), BLOCK_V=columns, EPS=L2_EPS,
    )  # fmt: skip


def scan_steps(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    states: torch.Tensor,
    plan: BatchPlan,
    seqs: int,
    out: torch.Tensor,
) -> None:
    """Compute the first `seqs` sequences of the plan. Tensors are dense after their tokens."""
    assert plan.states is not None, "a batch of a recurrent model needs states"
    (heads, dim), (groups, n) = x.shape[1:], b.shape[1:]
    of_group, width = heads // groups * dim, power_of_two(n)
    rows = min(max(1, STATE // width), power_of_two(of_group))
    scan_step_kernel[(seqs, groups, triton.cdiv(of_group, rows))](
        x, dt, a, b, c, a if d is None else d, states, out,
        plan.query_start, plan.states.before, plan.states.after, seqs,
        x.stride(0), dt.stride(0), b.stride(0), c.stride(0), states.stride(0), heads, of_group,
        DIM=dim, N=n, EACH=a.dim() == 2, DIRECT=d is not None, ROWS=rows, BLOCK_N=width,
    )  # fmt: skip
