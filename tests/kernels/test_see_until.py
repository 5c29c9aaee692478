"""Tokens that see later ones of their chunk, as those of an image do in Gemma 3, on the CPU's kernels."""

from __future__ import annotations

from typing import Never

import pytest
import torch

from kvferry.kernels.cpu import CpuOps, instruction_set, instruction_sets
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import ReferenceOps
from tests.kernels.paged_batch import close, dense_attention, make_case, seeing_ahead
from tests.pairwise import pairwise

OPS = (ReferenceOps, CpuOps) if instruction_set() else (ReferenceOps,)
IMAGES = [(2, 19), (22, 23), (23, 27)]
"""The first is all of a chunk; behind it a token of text, and two images in the middle and at the end."""
LONG_IMAGES = [(3, 140), (150, 290), (301, 302), (303, 400)]
"""Images over several tiles of query rows and blocks of positions, the last at the end of its chunk."""


@pytest.mark.parametrize(("window", "dtype", "make"), pairwise([0, 1, 7, 16, 60], [torch.float32, torch.bfloat16], OPS))
def test_images_beside_text_and_decodes(window: int, dtype: torch.dtype, make: type[Ops]) -> None:
    case = make_case([1, 1, 17, 8, 20], [40, 3, 50, 30, 20], 2, heads=4, kv_heads=2, dim=32, dtype=dtype)
    seeing = seeing_ahead(case, IMAGES)
    assert (dense_attention(seeing, 0.25, window) - dense_attention(case, 0.25, window)).abs().max() > 0.05
    found = make().paged_attention(seeing.q, seeing.kv_layer, seeing.plan, 0.25, window)
    close(found, dense_attention(seeing, 0.25, window), dtype)


def _refused(*_: object) -> Never:
    raise AssertionError("the reference serves what the compiled kernels should")


@pytest.mark.parametrize("name", instruction_sets())
@pytest.mark.parametrize(("window", "cache"), [(0, None), (5, torch.int8), (100, None), (100, torch.int8)])
def test_long_images_go_through_the_compiled_kernels(
    name: str, window: int, cache: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case([1, 300, 99], [9, 340, 99], 1, dim=64, dtype=torch.bfloat16, cache=cache)
    case = seeing_ahead(case, LONG_IMAGES)
    monkeypatch.setattr(ReferenceOps, "paged_attention", _refused)
    found = CpuOps(2, name).paged_attention(case.q, case.kv_layer, case.plan, 0.25, window, 30.0)
    close(found, dense_attention(case, 0.25, window, 30.0), torch.bfloat16)


@pytest.mark.skipif(not instruction_set(), reason="installed without the CPU extension")
@pytest.mark.parametrize("until", [[4, 5, 6, 7], [3, 5, 6, 7], [4, 5, 6, 8], [4, 5, 7]])
def test_tokens_see_at_least_themselves_and_at_most_their_sequence(until: list[int]) -> None:
    ops, q = CpuOps(1), torch.zeros(4, 2, 32, dtype=torch.bfloat16)
    kv, blocks = torch.zeros(1, 2, 1, 8, 32, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    ends = torch.tensor(until, dtype=torch.int32)

    def attend() -> None:
        ops.kernels.prefill(q, kv, blocks, 8, 1.0, 0, 0.0, None, ends, torch.empty_like(q))

    if until == [4, 5, 6, 7]:
        return attend()
    with pytest.raises(ValueError, match="see"):
        attend()
