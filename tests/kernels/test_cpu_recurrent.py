"""Recurrent layers on the compiled kernels of every instruction set, against the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from kvferry.kernels.cpu import CpuOps, instruction_sets
from kvferry.kernels.recurrent_layers import TorchRecurrent
from kvferry.kernels.reference import ReferenceOps
from tests.kernels.recurrent_batch import (
    BATCHES,
    CHANNELS,
    CONVOLUTIONS,
    DELTA_RULES,
    SCANS,
    Known,
    Layer,
    both,
    convolution,
    delta_rule,
    equal,
    every_layer,
    extreme_delta_rule,
    extreme_scan,
    gated_convolution,
    known,
    plan_of,
    scan,
)

DTYPES = [torch.float32, torch.bfloat16]
SETS = instruction_sets()

pytestmark = pytest.mark.skipif(not SETS, reason="installed without the CPU extension")


@functools.cache
def made(name: str, threads: int = 2) -> CpuOps:
    return CpuOps(threads, name)


@pytest.fixture(params=SETS)
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return made(request.param)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_convolutions(ops: CpuOps, dtype: torch.dtype, batch: str) -> None:
    for name in CONVOLUTIONS:
        for bias in (True, False):
            both(ops, batch, known(convolution, name, batch, dtype, bias=bias))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_of_a_convolution_round_as_products_of_their_own(ops: CpuOps, dtype: torch.dtype, batch: str) -> None:
    """Whatever multiplies before and behind it, so that all backends and recorded steps agree."""
    lens, before, after = BATCHES[batch]
    for name in CONVOLUTIONS:
        case = known(gated_convolution, name, batch, dtype)
        both(ops, batch, case)
        rows = case[0].rows()
        own, others = rows.clone(), rows.clone()
        found = case[0].run(ops, plan_of(lens, own, before, after))
        x, weight, bias = case[0].inputs
        plan = plan_of(lens, others, before, after)
        assert torch.equal(found, TorchRecurrent.gated_conv(ops, x, weight, bias, case[0].states(others), plan))
        assert torch.equal(own, others)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_delta_rules(ops: CpuOps, dtype: torch.dtype, batch: str) -> None:
    for name in DELTA_RULES:
        both(ops, batch, known(delta_rule, name, batch, dtype))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scans(ops: CpuOps, dtype: torch.dtype, batch: str) -> None:
    for name in (*SCANS, *CHANNELS):
        for direct in (True, False):
            both(ops, batch, known(scan, name, batch, dtype, direct=direct))


def test_weights_of_a_convolution_may_have_another_dtype(ops: CpuOps) -> None:
    layer = convolution("Qwen3.5", 7, torch.float32)
    x, weight, bias = layer.inputs
    assert x is not None
    assert weight is not None
    assert bias is not None
    mixed = Layer(layer.kind, (x.bfloat16(), weight, bias.bfloat16()), layer.of_tokens, layer.inner)
    rows = layer.rows()
    wanted = mixed.run(ReferenceOps(), plan_of((7,), rows.clone(), (1,), (2,)))
    equal(mixed.run(ops, plan_of((7,), rows, (1,), (2,))), wanted, torch.bfloat16)


@functools.cache
def long_prompt(make: Callable[[int], Layer]) -> Known:
    layer = make(2000)
    rows = layer.rows()
    return layer, layer.run(ReferenceOps(), plan_of((2000,), rows, (3,), (4,))), rows


@pytest.mark.parametrize("make", [extreme_delta_rule, extreme_scan])
def test_a_long_prompt_with_extreme_decays(ops: CpuOps, make: Callable[[int], Layer]) -> None:
    layer, wanted, states = long_prompt(make)
    rows = layer.rows()
    found = layer.run(ops, plan_of((2000,), rows, (3,), (4,)))
    assert found.isfinite().all()
    for head in range(found.shape[1]):
        equal(found[:, head], wanted[:, head], torch.float32)
    equal(rows, states, torch.float32)


@pytest.mark.parametrize("ends", [(1, 2, 3, 200), (31, 32, 33, 200), (4, 100, 164, 200)])
def test_chunks_of_a_prompt_give_what_the_whole_gives(ops: CpuOps, ends: tuple[int, ...]) -> None:
    for make in (extreme_delta_rule, extreme_scan):
        layer = make(200)
        rows, begin, found = layer.rows(), 0, []
        whole = rows.clone()
        wanted = layer.run(ops, plan_of((200,), whole, (5,), (0,)))
        for turn, end in enumerate(ends):
            plan = plan_of((end - begin,), rows, (turn if turn else 5,), (turn + 1,))
            found.append(layer.cut(begin, end).run(ops, plan))
            begin = end
        equal(torch.cat(found), wanted, torch.float32)
        equal(layer.states(rows)[len(ends)], layer.states(whole)[0], torch.float32)


@pytest.mark.parametrize("name", SETS)
def test_bits_depend_on_neither_neighbours_nor_threads(name: str) -> None:
    lens, before, after = BATCHES["all"]
    for layer in every_layer(sum(lens), torch.bfloat16):
        rows = layer.rows()
        together = rows.clone()
        wanted = layer.run(made(name, 1), plan_of(lens, together, before, after))
        shared = rows.clone()
        assert torch.equal(layer.run(made(name, 3), plan_of(lens, shared, before, after)), wanted)
        assert torch.equal(shared, together)
        start = 0
        for count, first, last in zip(lens, before, after, strict=True):
            own = rows.clone()
            alone = layer.cut(start, start + count).run(made(name), plan_of((count,), own, (first,), (last,)))
            assert torch.equal(alone, wanted[start : start + count])
            assert last < 0 or torch.equal(own[last], together[last])
            start += count


@pytest.mark.parametrize("name", SETS)
def test_a_chain_of_decodes_gives_what_they_give_one_after_the_other(name: str) -> None:
    """Beside another chain, and a sequence that only reads."""
    before, after = (4, 5, 6, 1, -1, 2), (5, 6, 7, -1, 2, 3)
    for layer in every_layer(6, torch.float32):
        rows = layer.rows()
        chained, ops = rows.clone(), made(name)
        found = layer.run(ops, plan_of((1,) * 6, chained, before, after))
        for at, (first, last) in enumerate(zip(before, after, strict=True)):
            alone = layer.cut(at, at + 1).run(ops, plan_of((1,), rows, (first,), (last,)))
            assert torch.equal(alone[0], found[at])
        assert torch.equal(chained, rows)


@pytest.mark.parametrize("name", SETS)
def test_float16_is_left_to_the_reference(name: str) -> None:
    for layer in every_layer(3, torch.float16):
        rows = layer.rows()
        wanted = layer.run(ReferenceOps(), plan_of((3,), rows.clone(), (0,), (1,)))
        assert torch.equal(layer.run(made(name), plan_of((3,), rows, (0,), (1,))), wanted)


def test_what_does_not_fit_is_refused() -> None:
    ops, layer = made(SETS[0]), delta_rule("tiny", 3, torch.float32)
    rows = layer.rows()
    with pytest.raises(ValueError, match="outside the states"):
        layer.run(ops, plan_of((3,), rows, (12,), (1,)))
    with pytest.raises(ValueError, match="differ in shape"):
        layer.run(ops, plan_of((4,), rows, (0,), (1,)))
    with pytest.raises(ValueError, match="another shape"):
        Layer(layer.kind, layer.inputs, layer.of_tokens, (4, 5, 8)).run(ops, plan_of((3,), rows, (0,), (1,)))
    with pytest.raises(ValueError, match="one per sequence"):
        layer.run(ops, plan_of((3,), rows, (0, 1), (1, 2)))
