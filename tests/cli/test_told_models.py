"""What the doctor says of models of which nothing but headers is read."""

from __future__ import annotations

import importlib.util
import json
import types

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.torch import save_file

from kvferry.cli import doctor
from kvferry.cli.check_result import Result
from kvferry.cli.doctor import all_checks, report
from kvferry.protocol.settings import ServeSettings
from tests.gguf_files import finish

QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}


def directory(path, **changes):
    tensors = {
        "model.embed_tokens.weight": torch.zeros(128, 64, dtype=torch.bfloat16),
        "model.layers.0.mlp.down_proj.qweight": torch.zeros(8, 64, dtype=torch.int32),
        "model.layers.0.mlp.down_proj.qzeros": torch.zeros(2, 8, dtype=torch.int32),
        "model.layers.0.mlp.down_proj.scales": torch.zeros(2, 64, dtype=torch.float16),
    }
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(QWEN3 | changes))
    return str(path)


def model_report(model: str, **settings) -> Result:
    (result,) = all_checks(ServeSettings(model=(model,), device="cpu", **settings), [("model", doctor.model)])
    return result


def test_family_path_formats_and_memory(tmp_path, monkeypatch):
    weights = 64 * 64 * 18 // 32 + 2 * 128 * 64
    room = types.SimpleNamespace(available=weights + 1000 * 128 + 5)
    monkeypatch.setattr("psutil.virtual_memory", lambda: room)
    found = model_report(directory(tmp_path, quantization_config=GPTQ))
    assert found.level == "ok"
    assert "Qwen3ForCausalLM on kvferry's own decoder, gptq of 4 bits, groups of 32; " in found.found
    assert "KV 0.1 MiB for 1,000 tokens" in found.found
    assert "its longest sequence of 4096 tokens; memory here holds KV of 1,000 tokens beside its weights" in found.found
    longer = model_report(str(tmp_path), max_model_len=512)
    assert "sequence of 512 tokens" in longer.found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt_neox"}, "on transformers modules around kvferry's attention and dense layers, bfloat16"),
        ({"hidden_act": "relu"}, "on transformers modules around kvferry's attention"),
        (
            {"model_type": "gpt_neox", "quantization_config": GPTQ},
            "on transformers modules around kvferry's attention and dense layers, gptq of 4 bits, groups of 32",
        ),
        ({"dtype": "float16"}, "on kvferry's own decoder, float16"),
    ],
)
def test_the_path_is_told(changes, words, tmp_path):
    assert words in model_report(directory(tmp_path, **changes)).found


def test_latent_attention_is_told(tmp_path):
    """One vector of 576 numbers a token and layer; not in int8."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    groups = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    model = directory(tmp_path, model_type="deepseek_v3", num_hidden_layers=8, **sizes, **groups)
    found = model_report(model)
    assert "on kvferry's own decoder" in found.found
    assert f"KV {1000 * 8 * 576 * 2 / 2**20:.1f} MiB for 1,000 tokens" in found.found
    refused = model_report(model, kv_cache_dtype="int8")
    assert (refused.level, "int8 is not supported for latent attention" in refused.found) == ("fail", True)
    assert f"KV {1000 * 8 * 580 / 2**20:.1f} MiB for 1,000 tokens" in model_report(model, kv_cache_dtype="fp8").found


@pytest.mark.parametrize(("cache", "level"), [("fp8", "fail"), ("fp8_e4m3", "fail"), ("int8", "ok"), ("auto", "ok")])
def test_a_cache_that_cannot_be_batch_invariant_is_refused_before_anything_is_loaded(cache, level, tmp_path):
    path = directory(tmp_path, quantization_config=GPTQ)
    result = model_report(path, kv_cache_dtype=cache, batch_invariant=True)
    words = (
        f"batch_invariant is not supported with kv_cache_dtype {cache}, which PyTorch reads on a CPU; use int8 or auto"
    )
    assert (result.level, words in result.found) == (level, level == "fail")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": GPTQ | {"bits": 7}}, "'gptq', and 7 bits is not supported"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes'"),
        (
            {"quantization_config": GPTQ, "model_type": "flex_olmo", "num_experts": 4},
            "experts in codes of gptq run only on kvferry's own decoder",
        ),
        ({"model_type": "martian"}, "neither kvferry's own decoder nor transformers supports"),
        ({"kv_lora_rank": 64}, "MLA"),
    ],
)
def test_what_cannot_run_is_one_line_and_status_2(changes, words, tmp_path, capsys):
    settings = ServeSettings(model=(directory(tmp_path, **changes),), device="cpu")
    assert report(all_checks(settings, [("model", doctor.model), ("threads", doctor.threads)])) == 2
    line, _ = capsys.readouterr().out.splitlines()
    assert line.startswith("fail model")
    assert words in line


@pytest.mark.parametrize(("kind", "level"), [("Q4_0", "ok"), ("IQ2_XS", "fail")])
def test_formats_of_a_gguf(kind, level, tmp_path):
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(str(path), "qwen3")
    for name, value in {
        "block_count": 1,
        "context_length": 512,
        "embedding_length": 256,
        "feed_forward_length": 256,
    }.items():
        writer.add_uint32(f"qwen3.{name}", value)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    stored = GGMLQuantizationType[kind]
    blocks = np.zeros(quants.quant_shape_to_byte_shape((128, 256), stored), dtype=np.uint8)
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=stored)
    writer.add_tensor("blk.0.ffn_down.weight", np.zeros((256, 256), dtype=np.float32))
    finish(writer)
    found = model_report(str(path))
    assert found.level == level
    words = (
        "kvferry's own decoder, GGUF of float32 and Q4_0"
        if level == "ok"
        else "GGUF tensor type IQ2_XS is not supported"
    )
    assert words in found.found


def test_who_drafts_and_what_that_takes(tmp_path):
    paths = [tmp_path / name for name in ("model", "small", "other")]
    for path in paths:
        path.mkdir()
    model, small, other = (
        directory(path, **changes) for path, changes in zip(paths, ({}, {}, {"vocab_size": 64}), strict=True)
    )
    assert "; small drafts; " in model_report(model, num_speculative_tokens=4, speculative_model=small).found
    refused = model_report(model, num_speculative_tokens=4, speculative_model=other)
    assert (refused.level, report([refused])) == ("fail", 2)
    assert "other has a vocabulary of 64 tokens, model has another of 128" in refused.found
    settings = ServeSettings(model=(model,), device="cpu", kv_cache_gib=0.01, speculative_model=small)
    (memory,) = all_checks(settings, [("memory", doctor.memory)])
    assert "GiB for the draft model" in memory.found


@pytest.mark.parametrize("installed", [True, False])
def test_a_gguf_that_transformers_reads_needs_accelerate(installed, tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(str(path), "gpt2")
    for add in (writer.add_block_count, writer.add_context_length, writer.add_embedding_length, writer.add_head_count):
        add(32)
    writer.add_tensor("token_embd.weight", np.zeros((32, 32), dtype=np.float32))
    finish(writer)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: (types if installed else None) if name == "accelerate" else find(name),
    )
    found = model_report(str(path))
    words = "transformers modules around kvferry's attention and dense layers, GGUF of float32"
    assert (found.level, (words if installed else "pip install accelerate") in found.found) == (
        "ok" if installed else "fail",
        True,
    )
