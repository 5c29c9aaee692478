"""Ranks of a decoder whose heads share what is cached: who writes it, and when it is read."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.kernels.cpu import CpuOps, instruction_set
from tests.engine.joined_ranks import expect_equal, joined_ranks, whole
from tests.engine.tiny_models import OURS, oracle_logits, save_tiny, tokens_for

pytestmark = pytest.mark.usefixtures("one_thread")
LATENT = [name for name in OURS if name.startswith("deepseek")]


@pytest.mark.parametrize("name", LATENT)
def test_four_ranks_compute_what_transformers_does(name: str, tmp_path: Path) -> None:
    save_tiny(OURS[name](), tmp_path)
    tokens = tokens_for(40, 3)
    with joined_ranks(tmp_path, 4) as ranks:
        cache = expect_equal(ranks, whole(tmp_path))
        torch.testing.assert_close(cache.step({"c": tokens})[0], oracle_logits(tmp_path, tokens), rtol=2e-4, atol=2e-4)


@pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_kernels_do(dtype: torch.dtype, tmp_path: Path) -> None:
    save_tiny(OURS["deepseek-v3"](), tmp_path)
    with joined_ranks(tmp_path, 2, ops=CpuOps, dtype=dtype) as ranks:
        expect_equal(ranks, whole(tmp_path, CpuOps, dtype=dtype), 1e-4 if dtype == torch.float32 else 0.2)


def test_the_first_rank_alone_writes_and_the_others_wait_for_it(tmp_path: Path) -> None:
    save_tiny(OURS["deepseek-v3"](), tmp_path)
    early, wrote = threading.Event(), []
    with joined_ranks(tmp_path, 2) as ranks:
        first, other = (decoder.ops for decoder in ranks.decoders)
        write, attend = first.rope_and_cache, other.latent_attention

        def written(*arguments: Any) -> torch.Tensor:
            if not wrote:
                assert not early.wait(0.3), "it attends to what is not there yet"
            wrote.append(int(arguments[-1].slots.min()))
            return write(*arguments)

        def attended(*arguments: Any) -> torch.Tensor:
            early.set()
            assert int(arguments[2].slots.max()) == -1, "it has written"
            return attend(*arguments)

        first.rope_and_cache, other.latent_attention = written, attended
        expect_equal(ranks, whole(tmp_path))
    assert min(wrote) >= 0
