"""Latent attention by the Triton kernels, against keys and values written out. Collected by test_triton_latent.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_kernels import check
from benchmarks.gpu_latent import latent_attention
from benchmarks.gpu_subject import Shape
from kvferry.engine.models import load_model
from kvferry.kernels.quantised_cache import FP8
from kvferry.kernels.reference import ReferenceOps
from kvferry.kernels.triton import TritonOps, latent_batch
from kvferry.kernels.triton.prefill import prefill
from kvferry.model_files.source import resolve
from tests.engine.tiny_models import OURS, chunked_logits, save_tiny, tokens_for
from tests.kernels.interpreted import DEVICE, bfloat16_products  # noqa: F401
from tests.kernels.paged_batch import close, make_plan, moved, rope_table
from tests.kernels.test_latent import LAYER, LAYERS, PLAIN, RANK, ROTATED, SCALE, SLOTS, Case, made

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def attend(case: Case, dtype: torch.dtype, processors: int, heads: int = 3) -> torch.Tensor:
    case.to(DEVICE)
    ops = TritonOps(processors)
    return ops.latent_attention(case.q, case.pool[:, LAYER], case.plan, SCALE, made(ops, dtype, DEVICE, heads)).cpu()


@pytest.mark.parametrize(("batch", "dtype"), [("prompts", torch.float32), *(("all", dtype) for dtype in DTYPES)])
def test_equals_keys_and_values_of_each_head(batch: str, dtype: torch.dtype) -> None:
    case = Case(batch, dtype)
    wanted = case.wanted(dtype)
    close(attend(case, dtype, 1), wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_in_fp8(dtype: torch.dtype) -> None:
    case = Case("all", dtype, cache=FP8)
    wanted = case.wanted(dtype)
    close(attend(case, dtype, 4), wanted, dtype)


@pytest.mark.parametrize("expanded", [False, True])
def test_both_forms_of_chunks_are_the_same(expanded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_batch, "expands", lambda *_: expanded)
    case = Case("all", torch.float32)
    wanted = case.wanted(torch.float32)
    close(attend(case, torch.float32, 4), wanted, torch.float32)


@pytest.mark.parametrize(("heads", "most"), [((3,), 10**9), ((2, 1), 300_000), ((1, 1, 1), 200_000), ((1, 1, 1), 1)])
def test_keys_and_values_are_made_of_as_many_heads_as_have_room(
    heads: tuple[int, ...], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts of four and two blocks in float32, 147,456 bytes a head."""
    made_of, room = [], most

    def seen(q: torch.Tensor, pages: torch.Tensor, *rest: Any) -> None:
        made_of.append(pages.shape[2])
        assert pages.numel() * pages.element_size() <= room or pages.shape[2] == 1
        prefill(q, pages, *rest)

    monkeypatch.setattr(latent_batch, "MAX_BYTES", most)
    monkeypatch.setattr(latent_batch, "prefill", seen)
    case = Case("prompts", torch.float32)
    wanted = case.wanted(torch.float32)
    close(attend(case, torch.float32, 4), wanted, torch.float32)
    assert tuple(made_of) == heads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("processors", [4, 16])
def test_contexts_are_split_and_heads_are_tiles(dtype: torch.dtype, processors: int) -> None:
    """20 heads are two tiles; of the parts of short sequences some are empty."""
    case = Case("decodes", dtype, heads=20)
    wanted = case.wanted(dtype)
    close(attend(case, dtype, processors, heads=20), wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotated", [True, False])
def test_one_vector_a_token_is_written_as_by_the_reference(dtype: torch.dtype, rotated: bool) -> None:
    plan, blocks = make_plan((1, 1, 5), (25, 90, 40), 2, SLOTS, 0)
    numbers = torch.Generator().manual_seed(9)
    q = torch.randn(plan.num_tokens, 3, ROTATED + PLAIN, generator=numbers).to(dtype)
    k = torch.randn(plan.num_tokens, 1, ROTATED + RANK, generator=numbers).to(dtype)
    table = rope_table(400, ROTATED) if rotated else (None, None)
    found = []
    for ops, device in ((TritonOps(), DEVICE), (ReferenceOps(), "cpu")):
        there = moved(plan, device)
        pool = torch.full((blocks, LAYERS, 1, 1, SLOTS, ROTATED + RANK), 7.0, dtype=dtype, device=device)
        cos, sin = (None if each is None else each.to(device) for each in table)
        turned = ops.rope_and_cache(q.to(device), k.to(device), None, cos, sin, pool[:, LAYER], there)
        found.append((turned.cpu(), pool.cpu()))
    for got, wanted in zip(*found, strict=True):
        close(got, wanted, dtype)


def test_models_compute_what_they_do_on_the_reference(tmp_path: Path) -> None:
    save_tiny(OURS["deepseek-v2"](), tmp_path)
    found = [
        chunked_logits(
            load_model(resolve(str(tmp_path)), device=torch.device(device), dtype=torch.float32, ops=ops),
            tokens_for(16), [9, 4, 1, 1, 1],
        )
        for ops, device in ((TritonOps(4), DEVICE), (ReferenceOps(), "cpu"))
    ]  # fmt: skip
    torch.testing.assert_close(*found, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("query_len", [1, 17])
def test_the_benchmark_measures_what_agrees(query_len: int) -> None:
    shape = Shape(3, 3, 16, torch.float32, torch.device(DEVICE))
    check(latent_attention(TritonOps(4), shape, 2, query_len, 20))
