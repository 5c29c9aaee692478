"""The mixture of experts against its formula in float64, and what a token's batch may not change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kvferry.kernels.cpu import CpuOps, instruction_sets
from kvferry.kernels.decoder_spec import Experts, Gated
from kvferry.kernels.expert_routing import Routing, route
from kvferry.kernels.experts import mixture
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import ReferenceOps
from kvferry.kernels.torch_operations import TorchGrouped, TorchLinear, grouped_by_torch

COUNT, HIDDEN, INNER = 6, 64, 96
SETS = instruction_sets()


def weights(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Router, gate_up and down of all experts."""
    numbers = torch.Generator().manual_seed(3)
    shapes = ((COUNT, HIDDEN), (COUNT, 2 * INNER, HIDDEN), (COUNT, HIDDEN, INNER))
    router, gate_up, down = (torch.randn(shape, generator=numbers).mul(0.2).to(dtype) for shape in shapes)
    return router, gate_up, down


def made(ops: Ops, dtype: torch.dtype, chosen: int, renormalised: bool) -> Experts:
    router, gate_up, down = weights(dtype)
    each = tuple(Gated(ops.linear(a), ops.linear(b)) for a, b in zip(gate_up, down, strict=True))
    return Experts(ops.linear(router), each, Routing(chosen, renormalised))


def tokens(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


def formula(x: torch.Tensor, dtype: torch.dtype, chosen: int, renormalised: bool) -> torch.Tensor:
    router, gate_up, down = (part.double() for part in weights(dtype))
    shares = (x.double() @ router.T).softmax(-1)
    kept = torch.zeros_like(shares).scatter(1, shares.topk(chosen).indices, 1.0) * shares
    if renormalised:
        kept = kept / kept.sum(-1, keepdim=True)
    gate, up = torch.einsum("th,eih->tei", x.double(), gate_up).chunk(2, -1)
    return torch.einsum("te,tei,ehi->th", kept, F.silu(gate) * up, down)


@pytest.mark.parametrize("renormalised", [False, True])
@pytest.mark.parametrize("chosen", [1, 2, COUNT])
@pytest.mark.parametrize("count", [1, 2, 50])
def test_the_reference_equals_the_formula(count: int, chosen: int, renormalised: bool) -> None:
    ops, x = ReferenceOps(), tokens(count, torch.float32)
    got = mixture(made(ops, torch.float32, chosen, renormalised), x, ops.gate_mul)
    wanted = formula(x, torch.float32, chosen, renormalised)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("count", [1, 50])
def test_grouped_products_equal_those_one_by_one(count: int, biased: bool) -> None:
    """Some experts have no token. No number of tokens is read by the host: a device would have to be waited for."""
    ops, x = ReferenceOps(), tokens(count, torch.bfloat16)
    router, gate_up, down = weights(torch.bfloat16)
    biases = [torch.randn(2 * INNER).bfloat16() if biased else None for _ in range(COUNT)]
    each = tuple(Gated(ops.linear(a, c), ops.linear(b)) for a, b, c in zip(gate_up, down, biases, strict=True))
    grouped = grouped_by_torch(each)
    assert grouped is not None
    plain = Experts(ops.linear(router), each, Routing(2))
    wanted = mixture(plain, x, ops.gate_mul)
    with NothingRead():
        got = mixture(replace(plain, grouped=grouped), x, ops.gate_mul)
    assert (got - wanted).norm() < 0.01 * wanted.norm()
    one_by_one = mixture(replace(plain, each=grouped.each), x, ops.gate_mul)
    assert torch.equal(one_by_one, wanted)
    alone, together = cast(TorchLinear, grouped.each[3].down), cast(TorchGrouped, grouped.down)
    assert alone.weight.untyped_storage().data_ptr() == together.weight.data_ptr(), "held once"


class NothingRead(TorchDispatchMode):
    """Fails what would wait for a device: numbers of a tensor that the host reads, and shapes that depend on them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "bincount", "nonzero", "item", "masked_select"), name
        return func(*args, **(kwargs or {}))


def test_experts_that_are_elsewhere_or_of_other_numbers_are_not_grouped() -> None:
    ops = ReferenceOps()
    for dtype, gone in ((torch.float32, False), (torch.bfloat16, True)):
        _, gate_up, down = weights(dtype)
        each = [Gated(ops.linear(a), ops.linear(b)) for a, b in zip(gate_up, down, strict=True)]
        assert grouped_by_torch([*each[:-1], None] if gone else each) is None


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("renormalised", [False, True])
def test_packed_layers_equal_the_formula(name: str, renormalised: bool) -> None:
    ops, x = CpuOps(2, name), tokens(50, torch.bfloat16)
    got = mixture(made(ops, torch.bfloat16, 2, renormalised), x, ops.gate_mul)
    wanted = formula(x, torch.bfloat16, 2, renormalised)
    assert (got - wanted).norm() < 0.01 * wanted.norm()


@pytest.mark.parametrize("name", SETS)
def test_a_tokens_bits_do_not_depend_on_its_batch(name: str) -> None:
    x = tokens(40, torch.bfloat16)
    ops = CpuOps(1, name)
    alone = made(ops, torch.bfloat16, 3, renormalised=True)
    rows = torch.cat([mixture(alone, x[i : i + 1], ops.gate_mul) for i in range(40)])
    for threads in (1, 2, 3):
        ops = CpuOps(threads, name)
        experts = made(ops, torch.bfloat16, 3, renormalised=True)
        assert torch.equal(mixture(experts, x, ops.gate_mul), rows)
        turned = mixture(experts, x.flip(0), ops.gate_mul).flip(0)
        assert torch.equal(turned, rows)
        assert torch.equal(mixture(experts, x[5:9], ops.gate_mul), rows[5:9])


def test_equal_experts_are_taken_in_the_same_order_whatever_the_batch() -> None:
    logits = torch.zeros(7, COUNT)
    _, chosen = route(logits, Routing(3, renormalised=True))
    assert all(torch.equal(route(logits[:1], Routing(3, renormalised=True))[1][0], row) for row in chosen)


def test_a_token_that_is_no_number_harms_no_other() -> None:
    ops, x = ReferenceOps(), tokens(5, torch.float32)
    experts = made(ops, torch.float32, 2, renormalised=True)
    wanted = mixture(experts, x, ops.gate_mul)
    x[2] = float("nan")
    got = mixture(experts, x, ops.gate_mul)
    assert got[2].isnan().all()
    torch.testing.assert_close(got[[0, 1, 3, 4]], wanted[[0, 1, 3, 4]])


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_on_the_inputs(ranks: int) -> None:
    ops, x = ReferenceOps(), tokens(50, torch.float32)
    plain = made(ops, torch.float32, ranks, False)
    routing = Routing(ranks, sigmoid=True, on_inputs=True)
    got = mixture(replace(plain, routing=routing), x, ops.gate_mul)
    weight, chosen = route(plain.router(x, torch.float32), routing)
    for token in range(50):
        wanted = torch.zeros(HIDDEN)
        for share, expert in zip(weight[token], chosen[token].tolist(), strict=True):
            mlp = plain.each[expert]
            assert mlp is not None
            wanted += mlp.down(ops.gate_mul(mlp.gate_up(share * x[token : token + 1])))[0]
        torch.testing.assert_close(got[token], wanted, rtol=1e-5, atol=1e-5)


def test_a_gate_of_the_shared_expert() -> None:
    ops, x = ReferenceOps(), tokens(20, torch.float32)
    _, gate_up, down = weights(torch.float32)
    shared, direction = Gated(ops.linear(gate_up[0]), ops.linear(down[0])), torch.randn(1, HIDDEN)
    plain = made(ops, torch.float32, 2, True)
    alone, both = mixture(plain, x, ops.gate_mul), mixture(replace(plain, shared=shared), x, ops.gate_mul)
    got = mixture(replace(plain, shared=shared, shared_gate=ops.linear(direction)), x, ops.gate_mul)
    torch.testing.assert_close(got - alone, (both - alone) * torch.sigmoid(x @ direction.T), rtol=1e-4, atol=1e-4)
