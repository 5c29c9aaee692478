"""What a model needs, against what really is in its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvferry.engine.models.families import FAMILIES
from kvferry.model_files.gguf import GGUFFile, GGUFTensor
from kvferry.model_files.memory_needs import config_needs, gguf_needs, model_needs
from kvferry.model_files.safetensors_headers import Tensor
from kvferry.model_files.source import resolve
from kvferry.model_files.supported_decoders import DECODERS
from kvferry.model_files.weight_counts import ON_CPU, ON_GPU, counted
from kvferry.protocol.errors import ConfigError

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
SHAPES = {
    "self_attn.q_proj": (64, 32),
    "self_attn.k_proj": (32, 32),
    "self_attn.v_proj": (32, 32),
    "self_attn.o_proj": (32, 64),
    "mlp.gate_proj": (48, 32),
    "mlp.up_proj": (48, 32),
    "mlp.down_proj": (32, 48),
}


def checkpoint(path, tied: bool):
    tensors = {
        f"model.layers.{i}.{name}.weight": torch.zeros(shape) for i in range(2) for name, shape in SHAPES.items()
    }
    tensors["model.norm.weight"], tensors["model.embed_tokens.weight"] = torch.zeros(32), torch.zeros(100, 32)
    if not tied:
        tensors["lm_head.weight"] = torch.zeros(100, 32)
    save_file(tensors, path / "model.safetensors")
    config = CONFIG | {"tie_word_embeddings": tied}
    (path / "config.json").write_text(json.dumps(config))
    return config


@pytest.mark.parametrize("tied", [True, False])
def test_config_and_headers_tell_the_same(tmp_path, tied):
    config = checkpoint(tmp_path, tied)
    needs = model_needs(resolve(str(tmp_path)))
    assert needs == config_needs(config, max_model_len=64)
    dense = 2 * (2 * 64 * 32 + 2 * 32 * 32 + 3 * 48 * 32)
    assert needs.parameters == dense + (1 if tied else 2) * 3200
    assert needs.memory(2) == 2 * needs.parameters
    assert needs.step_bytes(2) == 2 * (dense + 3200)
    assert needs.kv_bytes("bfloat16") == 2 * 2 * 2 * 16 * 2
    assert needs.kv_bytes("int8") == needs.kv_bytes("float8_e4m3fn") == 2 * 2 * 2 * (16 + 4)
    assert needs.prompt_work(1) == 2 * (dense + 3200) + 4 * 2 * 64


def test_the_demo_model_is_counted_as_it_is_stored():
    needs = model_needs(resolve("smollm2"))
    assert (needs.parameters, needs.layers, needs.kv_heads, needs.head_dim) == (134_479_872, 30, 3, 64)
    assert 92e6 < needs.memory(2, ON_CPU) < 100e6
    assert needs.memory(2) == 2 * 134_479_872
    assert needs.kv_bytes("bfloat16") == 23_040


def test_of_a_gguf_mixture_a_token_meets_some_experts():
    shapes = {"token_embd.weight": (10, 64), "blk.0.ffn_up_exps.weight": (8, 48, 64), "blk.0.attn_q.weight": (64, 64)}
    path = Path("a.gguf")
    tensors = {name: GGUFTensor(name, shape, 8, 0) for name, shape in shapes.items()}
    values = {"embedding_length": 64, "block_count": 1, "attention.head_count": 4, "expert_count": 8}
    metadata = {f"qwen3moe.{name}": value for name, value in (values | {"expert_used_count": 2}).items()}
    needs = gguf_needs(GGUFFile(path, metadata | {"general.architecture": "qwen3moe"}, tensors, (path,)))
    assert needs.dense.active == 64 * 64 + 2 * 48 * 64
    assert needs.dense.weights == 64 * 64 + 8 * 48 * 64


def test_of_a_mixture_a_token_meets_some_experts():
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    needs = config_needs(CONFIG | experts)
    attention, mlp = 2 * (2 * 64 * 32 + 2 * 32 * 32), 2 * 3 * 48 * 32
    assert needs.dense.weights == attention + 8 * mlp
    assert needs.dense.active == attention + 2 * mlp
    assert needs.step_bytes(2) == pytest.approx(2 * (attention + 2 * mlp + 3200))


def test_what_cannot_be_told_is_refused(tmp_path):
    config = checkpoint(tmp_path, tied=True)
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        config_needs({**config, "num_hidden_layers": None})
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigError, match=r"header of .*model\.safetensors; download it again"):
        model_needs(resolve(str(tmp_path)))


def test_the_block_formats_take_what_their_forms_take():
    """Small blocks as much as in their files; the others more, for scales of their own and codes of whole bits."""
    import gguf

    from kvferry.model_files.memory_needs import _STORED

    sizes = {gguf.GGMLQuantizationType(kind).name: size for kind, size in _STORED.items()}
    small = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
    for kind, (per, size) in gguf.GGML_QUANT_SIZES.items():
        if kind.name in small:
            assert sizes.pop(kind.name) == size / per
    halves = 2 / 32  # a float16 for 32 inputs
    assert sizes == {
        "Q2_K": 4 / 8 + 4 * halves,
        "Q3_K": 4 / 8 + 2 * halves,
        "Q4_K": 4 / 8 + 2 * halves,
        "Q5_K": 5 / 8 + 2 * halves,
        "Q6_K": 6 / 8 + 2 * halves,
        "IQ4_NL": 1 + halves,
        "IQ4_XS": 1 + halves,
        "MXFP4": 5 / 8 + halves,
    }


def test_an_encoder_keeps_nothing_between_steps() -> None:
    shape = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    assert config_needs(shape | {"model_type": "llama"}).kv_bytes("bfloat16") == 2 * 2 * 32 * 2
    assert config_needs(shape | {"model_type": "bert"}).kv_bytes("bfloat16") == 0


def test_who_runs_on_our_own_decoder_is_known_without_loading_it() -> None:
    """By names that are those of its families."""
    assert set(FAMILIES) == DECODERS
    assert model_needs(resolve("smollm2")).own
    text = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    assert config_needs({**text, "model_type": "qwen3"}).own
    assert not config_needs({**text, "model_type": "gpt_neox"}).own


@pytest.mark.parametrize("name", ["blk.0.attn_kv_b", "blk.0.attn_k_b", "model.layers.0.self_attn.kv_b_proj"])
def test_what_latent_attention_multiplies_queries_by_is_not_in_codes(name):
    dense, _, _ = counted([Tensor(f"{name}.weight", (64, 32), 1160.0, 1190.0)], 1.0)
    assert dense.bytes(2, ON_CPU) == dense.bytes(2, ON_GPU) == 2 * 64 * 32
