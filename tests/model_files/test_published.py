"""The table of models in docs/reference/models.md: published shapes, and what the doctor's function makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry.model_files.memory_needs import config_needs

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text()
FOUR_BITS = 4.5 / 8
"""Bytes a weight of Q4_0: 32 codes of 4 bits and a scale."""
READ = 50e9


def shape(hidden: int, layers: int, heads: str, inner: int, vocab: int, tied: bool, **more: Any) -> dict[str, Any]:
    query, kv = heads.split("/")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": int(query),
        "num_key_value_heads": int(kv),
        "intermediate_size": inner,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        **more,
    }


WIDE = {"head_dim": 128}
MODELS = {
    "SmolLM2-135M": (0.135, shape(576, 30, "9/3", 1536, 49152, True)),
    "SmolLM2-1.7B": (1.71, shape(2048, 24, "32/32", 8192, 49152, True)),
    "SmolLM3-3B": (3.08, shape(2048, 36, "16/4", 11008, 128256, True)),
    "Llama-3.2-1B": (1.24, shape(2048, 16, "32/8", 8192, 128256, True)),
    "Llama-3.2-3B": (3.21, shape(3072, 28, "24/8", 8192, 128256, True)),
    "Llama-3.1-8B": (8.03, shape(4096, 32, "32/8", 14336, 128256, False)),
    "Llama-3.3-70B": (70.6, shape(8192, 80, "64/8", 28672, 128256, False)),
    "Mistral-7B-v0.3": (7.25, shape(4096, 32, "32/8", 14336, 32768, False)),
    "Qwen2.5-0.5B": (0.494, shape(896, 24, "14/2", 4864, 151936, True)),
    "Qwen2.5-7B": (7.62, shape(3584, 28, "28/4", 18944, 152064, False)),
    "Qwen3-0.6B": (0.596, shape(1024, 28, "16/8", 3072, 151936, True, **WIDE)),
    "Qwen3-4B": (4.02, shape(2560, 36, "32/8", 9728, 151936, True, **WIDE)),
    "Qwen3-8B": (8.19, shape(4096, 36, "32/8", 12288, 151936, False, **WIDE)),
    "Qwen3-32B": (32.8, shape(5120, 64, "64/8", 25600, 151936, False, **WIDE)),
}


def row(name: str) -> str:
    needs = config_needs(MODELS[name][1])
    sizes = (needs.memory(2) / 1e9, needs.memory(FOUR_BITS) / 1e9, 1000 * needs.kv_bytes("bfloat16") / 1e6)
    speeds = (READ / needs.step_bytes(2), READ / needs.step_bytes(FOUR_BITS))
    cells = [
        f"{sizes[0]:.3g} GB",
        f"{sizes[1]:.2g} GB",
        f"{sizes[2]:.0f} MB",
        *(f"{float(f'{speed:.2g}'):g}" for speed in speeds),
    ]
    return f"| {name} | {' | '.join(cells)} |"


@pytest.mark.parametrize("name", MODELS)
def test_the_count_of_weights_is_the_published_one(name):
    billions, config = MODELS[name]
    assert config_needs(config).parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_the_page_s_row_is_what_the_function_says(name):
    assert row(name) in PAGE.splitlines(), row(name)
