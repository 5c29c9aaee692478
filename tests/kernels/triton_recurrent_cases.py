"""Recurrent layers by the Triton kernels, against the reference. Collected by test_triton_recurrent.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.reference import ReferenceOps
from kvferry.kernels.sequence_state import SequenceStates
from kvferry.kernels.triton import TritonOps
from tests.kernels.interpreted import DEVICE, bfloat16_products  # noqa: F401
from tests.kernels.recurrent_batch import (
    BATCHES,
    CONVOLUTIONS,
    Known,
    Layer,
    convolution,
    delta_rule,
    equal,
    extreme_delta_rule,
    extreme_scan,
    known,
    plan_of,
    scan,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def there(layer: Layer, lens: tuple[int, ...], rows: torch.Tensor, *numbers: tuple[int, ...]) -> torch.Tensor:
    """Run the layer on the device; `rows` are changed."""
    own = rows.to(DEVICE)
    plan: BatchPlan = plan_of(lens, own, *numbers)
    assert plan.states is not None
    states = SequenceStates(own, plan.states.before.to(DEVICE), plan.states.after.to(DEVICE))
    plan = replace(plan, query_start=plan.query_start.to(DEVICE), states=states)
    inputs = tuple(None if each is None else each.to(DEVICE) for each in layer.inputs)
    found = replace(layer, inputs=inputs).run(TritonOps(1), plan)
    rows.copy_(own)
    return found.cpu()


def check(case: Known, batch: str) -> None:
    layer, wanted, states = case
    rows = layer.rows()
    found = there(layer, BATCHES[batch][0], rows, *BATCHES[batch][1:])
    share = 1e-5 if wanted.dtype == torch.float32 or DEVICE == "cpu" else 5e-3
    equal(found, wanted, wanted.dtype, share)
    equal(rows, states, torch.float32, share)


@pytest.mark.parametrize("batch", ["decodes", "all"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_convolutions(dtype: torch.dtype, batch: str) -> None:
    for name in CONVOLUTIONS:
        check(known(convolution, name, batch, dtype, bias=name != "LFM2"), batch)


@pytest.mark.parametrize(
    ("name", "batch"), [("Qwen3.5", "decodes"), ("odd", "all"), ("tiny", "all"), ("tiny", "a chunk")]
)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_delta_rules(dtype: torch.dtype, name: str, batch: str) -> None:
    check(known(delta_rule, name, batch, dtype), batch)


@pytest.mark.parametrize(
    ("name", "batch"), [("groups", "decodes"), ("odd", "all"), ("Falcon-H1", "a chunk"), ("Jamba", "decodes")]
)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_scans(dtype: torch.dtype, name: str, batch: str) -> None:
    for direct in (True, False):
        check(known(scan, name, batch, dtype, direct=direct), batch)


@pytest.mark.parametrize("make", [delta_rule, scan])
def test_float16(make) -> None:  # type: ignore[no-untyped-def]
    check(known(make, "odd", "all", torch.float16), "all")


@pytest.mark.parametrize("make", [extreme_delta_rule, extreme_scan])
def test_extreme_decays(make) -> None:  # type: ignore[no-untyped-def]
    layer = make(130)
    rows, known_rows = layer.rows(), layer.rows()
    wanted = layer.run(ReferenceOps(), plan_of((130,), known_rows, (3,), (4,)))
    equal(there(layer, (130,), rows, (3,), (4,)), wanted, torch.float32)
    equal(rows, known_rows, torch.float32)


def test_mamba_1_goes_through_prompts_token_by_token() -> None:
    layer = scan("Jamba", 9, torch.float32)
    rows = layer.rows()
    found = there(layer, (9,), rows, (2,), (1,))
    own = layer.rows()
    places = (2, *(1, 3) * 4, 1)
    parts = [there(layer.cut(at, at + 1), (1,), own, (places[at],), (places[at + 1],)) for at in range(9)]
    torch.testing.assert_close(torch.cat(parts), found)
    torch.testing.assert_close(own[1], rows[1])


@pytest.mark.parametrize("make", [convolution, delta_rule, scan])
def test_a_chain_gives_what_its_sequences_give_one_after_the_other(make) -> None:  # type: ignore[no-untyped-def]
    """Two chains, of which one ends with a prompt."""
    lens, before, after = (1, 1, 1, 1, 7), (4, 5, -1, 2, 3), (5, 6, 2, 3, 1)
    layer = make("odd", sum(lens), torch.float32)
    rows, own = layer.rows(), layer.rows()
    found, start = there(layer, lens, rows, before, after), 0
    for count, first, last in zip(lens, before, after, strict=True):
        alone = there(layer.cut(start, start + count), (count,), own, (first,), (last,))
        torch.testing.assert_close(found[start : start + count], alone)
        start += count
    torch.testing.assert_close(rows, own)
