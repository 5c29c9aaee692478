"""Latent attention of prompts on the compiled kernels: in both forms, whatever is held at a time and however prompts
are cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.cpu import CpuOps, instruction_sets
from tests.kernels.paged_batch import LAYER, close
from tests.kernels.test_latent import BATCHES, HEADS, PLAIN, RANK, SCALE, VALUE, Case, made, weights

BF16 = torch.bfloat16
SETS = instruction_sets()

pytestmark = pytest.mark.skipif(not SETS, reason="installed without the CPU extension")


@pytest.fixture(params=[False, True], ids=["absorbed", "expanded"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is left to the reference."""
    monkeypatch.setattr("kvferry.kernels.cpu.ops.ReferenceOps.latent_attention", None)
    monkeypatch.setattr("kvferry.kernels.cpu.latent.expands", lambda *_: request.param)


@pytest.fixture(params=SETS)
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return CpuOps(2, request.param)


def held(monkeypatch: pytest.MonkeyPatch, positions: int, size: int) -> None:
    monkeypatch.setattr("kvferry.kernels.cpu.latent._SPAN", positions)
    monkeypatch.setattr("kvferry.kernels.cpu.latent._BYTES", size)


def part_of(case: Case, begin: int, end: int) -> tuple[BatchPlan, torch.Tensor]:
    """Plan and queries of some tokens of the case's only sequence, all of which is its prompt."""
    plan = replace(
        case.plan,
        positions=case.plan.positions[begin:end],
        slots=case.plan.slots[begin:end],
        query_start=torch.tensor([0, end - begin], dtype=torch.int32),
        total_len=torch.tensor([end], dtype=torch.int32),
        query_lens=(end - begin,),
        total_lens=(end,),
    )
    return plan, case.q[begin:end]


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("cache", [None, torch.int8])
@pytest.mark.parametrize("batch", [name for name in BATCHES if name != "decodes"])
def test_both_forms_equal_keys_and_values_of_each_head(ops: CpuOps, batch: str, cache: torch.dtype | None) -> None:
    case = Case(batch, BF16, cache=cache)
    close(case.run(ops, BF16), case.wanted(BF16), BF16)


@pytest.mark.parametrize("cache", [None, torch.int8])
def test_decodes_of_many_heads(ops: CpuOps, cache: torch.dtype | None) -> None:
    case = Case("decodes and a prompt", BF16, heads=20, cache=cache)
    close(case.run(ops, BF16), case.wanted(BF16), BF16)


def test_decodes_of_many_heads_have_the_same_bits_alone_as_beside_more_than_are_held_at_a_time() -> None:
    case = Case("many decodes", BF16, heads=20)
    wanted = case.run(CpuOps(1), BF16)
    close(wanted, case.wanted(BF16), BF16)
    ops = CpuOps(3)
    own = made(ops, BF16, heads=20)
    assert torch.equal(ops.latent_attention(case.q, case.pool[:, LAYER], case.plan, SCALE, own), wanted)
    for row in (0, 48, 49, 59):
        plan = replace(
            case.plan,
            positions=case.plan.positions[row : row + 1],
            slots=case.plan.slots[row : row + 1],
            block_table=case.plan.block_table[row : row + 1],
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            total_len=case.plan.total_len[row : row + 1],
            query_lens=(1,),
            total_lens=(case.plan.total_lens[row],),
            num_decodes=1,
        )
        alone = ops.latent_attention(case.q[row : row + 1], case.pool[:, LAYER], plan, SCALE, own)
        assert torch.equal(alone, wanted[row : row + 1])


def test_a_context_longer_than_what_is_expanded_at_a_time() -> None:
    case = Case("long", BF16)
    close(case.run(CpuOps(2), BF16), case.wanted(BF16), BF16)


@pytest.mark.parametrize("cache", [None, torch.int8])
def test_bits_do_not_depend_on_what_is_held_at_a_time(
    ops: CpuOps, cache: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.kernels.cpu.latent.expands", lambda *_: True)
    case = Case("chunks of prompts", BF16, cache=cache)
    wanted = case.run(ops, BF16)
    for positions, size in ((128, 1), (128, 300_000), (256, 1 << 20)):
        held(monkeypatch, positions, size)  # one head, two of three, all
        assert torch.equal(case.run(ops, BF16), wanted)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("name", SETS)
def test_chunks_of_a_prompt_give_what_one_pass_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("one prompt", BF16)
    wanted = case.run(CpuOps(1, name), BF16)
    held(monkeypatch, 128, 1 << 20)
    ops = CpuOps(3, name)
    for cut in (1, 97, 128, 290):
        for begin, end in ((0, cut), (cut, 300)):
            plan, q = part_of(case, begin, end)
            part = ops.latent_attention(q, case.pool[:, LAYER], plan, SCALE, made(ops, BF16))
            assert torch.equal(part, wanted[begin:end])


@pytest.mark.parametrize("outputs", [16, 40, 64])
def test_layers_of_heads_equal_one_after_the_other(ops: CpuOps, outputs: int) -> None:
    numbers = torch.Generator().manual_seed(5)
    weight = torch.randn(3, outputs, 48, generator=numbers).to(BF16)
    wide = torch.randn(200, 3, 64, generator=numbers).to(BF16)
    for rows in (1, 7, 200):
        x = wide[:rows, :, 16:]
        found = ops.linear_of_heads(weight)(x)
        assert torch.equal(found, torch.stack([ops.linear(each)(x[:, head]) for head, each in enumerate(weight)], 1))


def test_what_does_not_fit_is_refused() -> None:
    case, ops = Case("one prompt", BF16), CpuOps(1)
    own = made(ops, BF16)
    short = replace(own, expand=ops.linear(weights(BF16)[1:].flatten(0, 1)))
    with pytest.raises(ValueError, match="K and V of the heads"):
        ops.latent_attention(case.q, case.pool[:, LAYER], case.plan, 1.0, short)
    longer = replace(case.plan, total_lens=(400,))
    with pytest.raises(ValueError, match="longer than its blocks"):
        ops.latent_attention(case.q, case.pool[:, LAYER], longer, 1.0, own)
    layers = ops.linear_of_heads(torch.zeros(HEADS, VALUE, RANK, dtype=BF16))
    with pytest.raises(ValueError, match="fit the weight"):
        layers(torch.zeros(2, HEADS, PLAIN, dtype=BF16))
