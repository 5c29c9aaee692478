"""GGUF files of DeepSeek V2 and V3, as older and newer converters write them, against the same model in safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kvferry.engine.models import load_model
from kvferry.engine.models.implementation import OWN, implementation_of
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.model_files.memory_needs import model_needs
from kvferry.model_files.source import resolve
from kvferry.model_files.unsupported_models import require_runnable
from kvferry.protocol.errors import ConfigError
from tests.engine.test_models_gguf import CPU, Kind, load, same_logits
from tests.engine.test_models_packed import correlation
from tests.engine.tiny_models import DEEPSEEK, YARN, family, save_tiny
from tests.gguf_files import finish, gguf_name

pytestmark = pytest.mark.usefixtures("one_thread")
STRETCHED = {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}
ALONE = DEEPSEEK | STRETCHED | {"n_group": 1, "topk_group": 1}
MODELS: dict[str, Any] = {
    "v2-lite": lambda: family("DeepseekV2Config", q_lora_rank=None, **DEEPSEEK | STRETCHED),
    "v2": lambda: family(
        "DeepseekV2Config",
        q_lora_rank=20,
        topk_method="group_limited_greedy",
        **ALONE | {"n_group": 4, "topk_group": 2},
    ),
    "v3": lambda: family("DeepseekV3Config", q_lora_rank=20, **ALONE | {"n_group": 4, "topk_group": 2}),
    "v3-one-group": lambda: family("DeepseekV3Config", q_lora_rank=20, norm_topk_prob=False, **ALONE),
}
OWN_NAMES = {
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}  # fmt: skip


def tensors_of(folder: Path, config: dict[str, Any], *, newer: bool) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    stacks: dict[str, list[torch.Tensor]] = {}
    named = load_file(folder / "model.safetensors")
    for name in sorted(named, key=lambda each: [int(part) if part.isdigit() else part for part in each.split(".")]):
        value, (stem, kind) = named[name], name.rsplit(".", 1)
        if not stem.startswith("model.layers."):
            found[gguf_name(name)] = value.numpy()
            continue
        layer, rest = stem.removeprefix("model.layers.").split(".", 1)
        if rest.startswith("mlp.experts."):
            part = rest.rsplit(".", 1)[1].removesuffix("_proj")
            stacks.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", []).append(value)
        elif kind == "e_score_correction_bias":
            found[f"blk.{layer}.exp_probs_b.bias"] = value.float().numpy()
        elif rest == "self_attn.kv_b_proj" and newer:
            heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
            made = value.view(heads, -1, config["kv_lora_rank"])
            found[f"blk.{layer}.attn_k_b.weight"] = made[:, :plain].transpose(1, 2).contiguous().numpy()
            found[f"blk.{layer}.attn_v_b.weight"] = made[:, plain:].contiguous().numpy()
        else:
            found[gguf_name(name, OWN_NAMES)] = value.numpy()
    return found | {name: torch.stack(parts).numpy() for name, parts in stacks.items()}


def write(path: Path, folder: Path, *, newer: bool = True, kind: Kind = Kind.F32, without: str = "") -> Path:
    config = json.loads((folder / "config.json").read_text())
    rope, rotated = config["rope_parameters"], config["qk_rope_head_dim"]
    head, rank = rotated + config["qk_nope_head_dim"], config["kv_lora_rank"]
    writer = gguf.GGUFWriter(str(path), "deepseek2")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(1 if newer else config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(rank + rotated if newer else head)
    writer.add_value_length(rank if newer else config["v_head_dim"])
    if newer:
        writer.add_key_length_mla(head)
        writer.add_value_length_mla(config["v_head_dim"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(bool(config.get("norm_topk_prob")))
    sigmoid = config["model_type"] == "deepseek_v3"
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX)
    if (config.get("n_group") or 1) > 1:
        writer.add_uint32("deepseek2.expert_group_count", config["n_group"])
        writer.add_uint32("deepseek2.expert_group_used_count", config["topk_group"])
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    for name, data in tensors_of(folder, config, newer=newer).items():
        blocks = data.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 and data.ndim > 1
        stored = kind if blocks and "ffn_gate_inp" not in name else Kind.F32
        if name != without:
            writer.add_tensor(name, gguf.quantize(data, stored), raw_dtype=stored)
    finish(writer)
    return path


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("name", ["v2-lite", "v2", "v3", "v3-one-group"])
def test_files_of_both_converters(name: str, newer: bool, tmp_path: Path) -> None:
    save_tiny(MODELS[name](), tmp_path / "hf")
    source = resolve(str(write(tmp_path / "a.gguf", tmp_path / "hf", newer=newer)))
    same_logits(load(source.path), tmp_path / "hf", tolerance=1e-4)
    require_runnable(source)
    assert implementation_of(source).path == OWN
    found, wanted = model_needs(source), model_needs(resolve(str(tmp_path / "hf")))
    assert (found.kv_heads, found.head_dim, found.planes) == (wanted.kv_heads, wanted.head_dim, wanted.planes)
    assert (found.parameters, found.dense.active) == (wanted.parameters, wanted.dense.active)


@pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension")
def test_block_formats_run_as_stored(tmp_path: Path) -> None:
    save_tiny(MODELS["v3"](), tmp_path / "hf")
    source = resolve(str(write(tmp_path / "q.gguf", tmp_path / "hf", kind=Kind.Q8_0)))
    model = load_model(source, device=CPU, dtype=torch.bfloat16, ops=CpuOps(1), quantization="auto")
    assert model.info.revision.endswith("+Q8_0")
    assert correlation(model, load(tmp_path / "hf")) > 0.99  # type: ignore[arg-type]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    save_tiny(MODELS["v3"](), tmp_path / "hf")
    for name, named in (("blk.1.attn_v_b.weight", "attn_kv_b"), ("blk.2.exp_probs_b.bias", "exp_probs_b.bias")):
        path = write(tmp_path / "a.gguf", tmp_path / "hf", without=name)
        with pytest.raises(ConfigError, match=f"lack the tensor .*{named}"):
            load(path)
