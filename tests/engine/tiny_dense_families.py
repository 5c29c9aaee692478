"""Tiny random models of the dense families whose layers differ from Llama's in small parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.engine.tiny_models import LLAMA3, YARN, family

PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 500.0}
MINISTRAL3 = YARN | {
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
    "original_max_position_embeddings": 16,
}
HUNYUAN = PLAIN | {"rope_type": "dynamic", "factor": 1.0, "alpha": 20.0}

DENSE: dict[str, Callable[[], Any]] = {
    "glm": lambda: family("GlmConfig", head_dim=16, pad_token_id=0),
    "glm-plain": lambda: family(
        "GlmConfig", head_dim=32, pad_token_id=0, attention_bias=False, tie_word_embeddings=True
    ),
    "glm-partial": lambda: family(
        "GlmConfig", head_dim=32, pad_token_id=0, rope_parameters=PLAIN | {"partial_rotary_factor": 0.25}
    ),
    "ernie4_5": lambda: family("Ernie4_5Config", head_dim=16, tie_word_embeddings=True),
    "ernie4_5-biased": lambda: family("Ernie4_5Config", head_dim=32, use_bias=True),
    "seed_oss": lambda: family("SeedOssConfig", head_dim=32),
    "seed_oss-biased": lambda: family("SeedOssConfig", head_dim=16, attention_out_bias=True, mlp_bias=True),
    "seed_oss-plain": lambda: family("SeedOssConfig", head_dim=16, attention_bias=False, tie_word_embeddings=True),
    "exaone4": lambda: family("Exaone4Config", num_hidden_layers=5, sliding_window=9),
    "exaone4-types": lambda: family(
        "Exaone4Config",
        sliding_window=11,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        tie_word_embeddings=True,
    ),
    "exaone4-full": lambda: family(
        "Exaone4Config", sliding_window=None, rope_parameters=LLAMA3, layer_types=["full_attention"] * 3
    ),
    "hunyuan_v1_dense": lambda: family("HunYuanDenseV1Config", head_dim=32, rope_parameters=HUNYUAN),
    "hunyuan_v1_dense-biased": lambda: family(
        "HunYuanDenseV1Config", head_dim=16, attention_bias=True, tie_word_embeddings=True
    ),
    "ministral": lambda: family(
        "MinistralConfig",
        sliding_window=9,
        head_dim=32,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "ministral-windows": lambda: family("MinistralConfig", sliding_window=11, head_dim=16),
    "ministral3": lambda: family("Ministral3Config", head_dim=32, rope_parameters=MINISTRAL3, sliding_window=None),
    "ministral3-tied": lambda: family(
        "Ministral3Config", head_dim=16, rope_parameters=MINISTRAL3, sliding_window=21, tie_word_embeddings=True
    ),
    "arcee": lambda: family("ArceeConfig"),
    "arcee-biased": lambda: family(
        "ArceeConfig", head_dim=32, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "arcee-gelu": lambda: family("ArceeConfig", hidden_act="gelu", rope_parameters=YARN),
    "apertus": lambda: family("ApertusConfig", rope_parameters=LLAMA3),
    "apertus-biased": lambda: family(
        "ApertusConfig", rope_parameters=PLAIN, attention_bias=True, tie_word_embeddings=True
    ),
    "nemotron": lambda: family("NemotronConfig"),
    "nemotron-biased": lambda: family(
        "NemotronConfig", head_dim=32, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, norm_eps=1e-3
    ),
    "olmo": lambda: family("OlmoConfig", pad_token_id=0),
    "olmo-clipped": lambda: family("OlmoConfig", pad_token_id=0, clip_qkv=0.8, tie_word_embeddings=True),
    "olmo-biased": lambda: family("OlmoConfig", pad_token_id=0, clip_qkv=1.5, attention_bias=True),
    "stablelm": lambda: family("StableLmConfig", rope_parameters=PLAIN | {"partial_rotary_factor": 0.5}),
    "stablelm-parallel": lambda: family(
        "StableLmConfig",
        use_parallel_residual=True,
        use_qkv_bias=True,
        tie_word_embeddings=True,
        layer_norm_eps=1e-3,
    ),
    "stablelm-qk-norm": lambda: family("StableLmConfig", qk_layernorm=True, use_parallel_residual=True),
    "starcoder2": lambda: family("Starcoder2Config", sliding_window=9, tie_word_embeddings=True),
    "starcoder2-plain": lambda: family("Starcoder2Config", use_bias=False, norm_epsilon=1e-3),
    "phi": lambda: family("PhiConfig"),
    "helium": lambda: family("HeliumConfig", head_dim=16),
}
"""Configurations by name; the part before a dash is the model_type."""
