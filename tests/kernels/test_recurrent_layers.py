"""Recurrent layers in PyTorch: against transformers' own functions, and cut into chunks in any way."""

import pytest
import torch
import torch.nn.functional as F

from kvferry.engine.models.hf import transformers_module
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.reference import ReferenceOps
from kvferry.kernels.sequence_state import SequenceStates, StateLayout

OPS = ReferenceOps()
LAYOUT = StateLayout(((6, 3), (4, 8, 5), (4, 5, 8)))
LENGTHS = (1, 1, 7, 2)


def plan_of(counts, rows, before, after):
    nothing = torch.zeros(0, dtype=torch.int64)
    states = SequenceStates(rows, torch.tensor(before), torch.tensor(after))
    decodes = sum(count == 1 for count in counts)
    return BatchPlan(
        nothing, nothing, nothing, nothing, nothing, tuple(counts), tuple(counts), decodes, 16, states=states
    )


def inputs(tokens):
    torch.manual_seed(tokens)
    conv = torch.randn(tokens, 6), torch.randn(6, 4), torch.randn(6)
    delta = (
        torch.randn(tokens, 2, 8), torch.randn(tokens, 2, 8), torch.randn(tokens, 4, 5),
        -torch.rand(tokens, 4), torch.rand(tokens, 4),
    )  # fmt: skip
    scan = (
        torch.randn(tokens, 4, 5), torch.rand(tokens, 4), -torch.rand(4), torch.randn(tokens, 2, 8),
        torch.randn(tokens, 2, 8), torch.randn(4),
    )  # fmt: skip
    return conv, delta, scan


def computed(parts, plan):
    """All three layers, over one row of states."""
    conv, delta, scan = parts
    rows = plan.states.rows
    return (
        OPS.causal_conv(*conv, states=LAYOUT.view(rows, 0), plan=plan, silu=True).flatten(1),
        OPS.gated_delta_rule(*delta, states=LAYOUT.view(rows, 1), plan=plan).flatten(1),
        OPS.state_space_scan(*scan, states=LAYOUT.view(rows, 2), plan=plan).flatten(1),
    )


def cut(parts, begin, end):
    (x, *conv), delta, (xs, dt, a, b, c, d) = parts
    return (
        (x[begin:end], *conv),
        tuple(each[begin:end] for each in delta),
        (xs[begin:end], dt[begin:end], a, b[begin:end], c[begin:end], d),
    )


@pytest.mark.parametrize("ends", [(1, 2, 3), (4, 11), (1, 10, 11), (5, 6, 11)])
def test_chunks_give_what_the_whole_gives(ends):
    parts = inputs(11)
    whole = computed(parts, plan_of((11,), torch.full((4, LAYOUT.floats), 9.0), (-1,), (-1,)))
    rows, begin, found = torch.full((4, LAYOUT.floats), 9.0), 0, []
    for turn, end in enumerate(ends):
        plan = plan_of((end - begin,), rows, (-1 if not turn else turn % 2,), ((turn + 1) % 2,))
        found.append(computed(cut(parts, begin, end), plan))
        begin = end
    for index, wanted in enumerate(whole):
        torch.testing.assert_close(torch.cat([each[index] for each in found]), wanted[: ends[-1]], atol=1e-5, rtol=1e-5)


def test_sequences_of_a_batch_keep_apart():
    parts = inputs(sum(LENGTHS))
    rows = torch.randn(9, LAYOUT.floats)
    before, after = (3, -1, 5, -1), (4, 6, -1, 7)
    untouched = rows.clone()
    together = computed(parts, plan_of(LENGTHS, rows, before, after))
    assert torch.equal(rows[[0, 1, 2, 3, 5, 8]], untouched[[0, 1, 2, 3, 5, 8]])
    start = 0
    for count, first, last in zip(LENGTHS, before, after, strict=True):
        own = untouched.clone()
        alone = computed(cut(parts, start, start + count), plan_of((count,), own, (first,), (last,)))
        for one, all_of_them in zip(alone, together, strict=True):
            torch.testing.assert_close(one, all_of_them[start : start + count])
        if last >= 0:
            torch.testing.assert_close(own[last], rows[last])
        start += count


def test_layers_are_those_of_transformers():
    transformers_module()
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

    (x, weight, bias), (q, k, v, decay, beta), (xs, dt, a, b, c, d) = parts = inputs(9)
    plan = plan_of((9,), torch.zeros(1, LAYOUT.floats), (-1,), (0,))
    conv, delta, scan = computed(parts, plan)
    torch.testing.assert_close(conv, F.silu(F.conv1d(F.pad(x.t(), (3, 0)), weight[:, None], bias, groups=6)).t())
    known, state = torch_recurrent_gated_delta_rule(
        q[None], k[None], v[None], decay[None], beta[None], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(delta, known[0].flatten(1))
    torch.testing.assert_close(LAYOUT.view(plan.states.rows, 1)[0], state[0])
    inner = torch.zeros(4, 5, 8)
    for at in range(9):
        left = (dt[at] * a).exp()[:, None, None]
        inner = left * inner + torch.einsum("h,hd,hn->hdn", dt[at], xs[at], b[at].repeat_interleave(2, 0))
        wanted = torch.einsum("hdn,hn->hd", inner, c[at].repeat_interleave(2, 0)) + d[:, None] * xs[at]
        torch.testing.assert_close(scan[at].view(4, 5), wanted)


def test_channels_of_mamba_1_are_heads_of_one_dimension():
    torch.manual_seed(3)
    x, dt, a, b, c = (
        torch.randn(6, 5, 1),
        torch.rand(6, 5),
        -torch.rand(5, 7),
        torch.randn(6, 1, 7),
        torch.randn(6, 1, 7),
    )
    layout = StateLayout(((5, 1, 7),))
    plan = plan_of((6,), torch.zeros(1, layout.floats), (-1,), (0,))
    found = OPS.state_space_scan(x, dt, a, b, c, None, layout.view(plan.states.rows, 0), plan)
    state = torch.zeros(5, 7)
    for at in range(6):
        state = (dt[at, :, None] * a).exp() * state + dt[at, :, None] * x[at] * b[at]
        torch.testing.assert_close(found[at, :, 0], (state * c[at]).sum(1))
    torch.testing.assert_close(layout.view(plan.states.rows, 0)[0, :, 0], state)
