"""Models whose layers differ in shape and share K/V, by Triton's kernels; on a GPU the kernels run for real.

Collected by test_triton_products.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvferry.engine.models import load_model
from kvferry.kernels.reference import ReferenceOps
from kvferry.kernels.triton import TritonOps
from kvferry.model_files.source import resolve
from tests.engine.tiny_models import GEMMA3N, GEMMA4, GEMMA4_LARGE, chunked_logits, family, save_tiny, tokens_for
from tests.kernels.interpreted import DEVICE
from tests.kernels.paged_batch import make_case, rope_table
from tests.kernels.tape import capture

FOUR = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
CONFIGS = {
    "gemma3n": lambda: family(
        "Gemma3nTextConfig",
        **GEMMA3N | FOUR | {"intermediate_size": 64, "activation_sparsity_pattern": [0.4, 0.0, 0.0, 0.2]},
    ),
    "gemma4": lambda: family("Gemma4TextConfig", **GEMMA4 | FOUR),
    "gemma4-large": lambda: family("Gemma4TextConfig", **GEMMA4_LARGE | FOUR),
}


@pytest.mark.parametrize("cache", [None, torch.int8])
@pytest.mark.parametrize("name", CONFIGS)
def test_prompts_and_replayed_steps_are_those_of_the_reference(
    name: str, cache: torch.dtype | None, tmp_path: Path
) -> None:
    save_tiny(CONFIGS[name](), tmp_path)
    source, device, tokens = resolve(str(tmp_path)), torch.device(DEVICE), tokens_for(20)
    rows = (ReferenceOps(), TritonOps(4, capture()))
    models = [load_model(source, device=device, dtype=torch.float32, ops=ops, impl="kvferry") for ops in rows]
    wanted, got = (chunked_logits(model, tokens, [17, 1, 1, 1], cache) for model in models)
    near = 1e-3 if cache is None else 5e-2
    torch.testing.assert_close(got, wanted, rtol=near, atol=near)


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_without_k_only_q_is_rotated(rotary_dim: int) -> None:
    case = make_case([1, 1, 4], [18, 33, 50], 2, heads=3, kv_heads=1)
    there = replace(case, pool=case.pool.clone()).to(DEVICE)
    cos, sin = (table.to(DEVICE) for table in rope_table(64, rotary_dim))
    turned = TritonOps().rope_and_cache(there.q, None, None, cos, sin, there.kv_layer, there.plan)
    wanted = ReferenceOps().rope_and_cache(
        there.q, there.q[:, :1], there.q[:, :1], cos, sin, there.kv_layer, there.plan
    )
    torch.testing.assert_close(turned, wanted)
