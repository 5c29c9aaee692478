"""GGUF files of hybrid families: names, reordered heads, values in other forms, and block formats as stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from kvferry.engine.models import load_model
from kvferry.engine.models.decoder import Decoder
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError
from tests.engine.hybrid_gguf import Converter
from tests.engine.tiny_hybrids import HYBRIDS
from tests.engine.tiny_models import chunked_logits, oracle_logits, save_tiny, tokens_for

CPU = torch.device("cpu")
Kind = gguf.GGMLQuantizationType
pytestmark = pytest.mark.usefixtures("one_thread")
needs_extension = pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension")


def load(path: Path, ops: Ops | None = None, dtype: torch.dtype = torch.float32, **extra: Any) -> Decoder:
    model = load_model(resolve(str(path)), device=CPU, dtype=dtype, ops=ops or ReferenceOps(), **extra)
    assert isinstance(model, Decoder)
    return model


def lfm2(config: Any) -> dict[str, Any]:
    return {"shortconv.l_cache": config.conv_L_cache}


def lfm2_moe(config: Any) -> dict[str, Any]:
    return lfm2(config) | {
        "leading_dense_block_count": config.num_dense_layers,
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_gating_func": 2,
    }


def qwen(config: Any) -> dict[str, Any]:
    fields = {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": 4,
        "rope.dimension_count": config.head_dim // 4,
    }
    if not hasattr(config, "num_experts"):
        return fields
    return fields | {
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
    }


def mamba2(config: Any) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
        "ssm.time_step_rank": config.mamba_n_heads,
    }


def granite(config: Any) -> dict[str, Any]:
    experts = {}
    if config.num_local_experts:
        experts = {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok}
        experts["expert_shared_feed_forward_length"] = config.shared_intermediate_size
    return (
        mamba2(config)
        | experts
        | {
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier,
            "attention.scale": config.attention_multiplier,
            "logit_scale": config.logits_scaling,
            "rope.scaling.finetuned": False,
        }
    )


def bamba(config: Any) -> dict[str, Any]:
    dims = config.hidden_size // config.num_attention_heads // 2
    return mamba2(config) | {"rope.scaling.finetuned": True, "rope.dimension_count": dims}


def jamba(config: Any) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "ssm.state_size": config.mamba_d_state,
        "ssm.time_step_rank": config.mamba_dt_rank,
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
    }


def nemotron_h(config: Any) -> dict[str, Any]:
    fields = {
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.time_step_rank": config.mamba_num_heads,
    }
    if "moe" not in config.layers_block_type:
        return fields
    if config.moe_latent_size:
        fields["moe_latent_size"] = config.moe_latent_size
    return fields | {
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_group_count": config.n_group,
    }


FILES = {
    "lfm2": ("lfm2", lambda config: lfm2(config) | {"feed_forward_length": 80}),
    "lfm2-moe": ("lfm2moe", lfm2_moe),
    "qwen3.5": ("qwen35", qwen),
    "qwen3.5-one-key-head": ("qwen35", qwen),
    "qwen3.5-moe": ("qwen35moe", qwen),
    "qwen3-next-renormalised": ("qwen3next", qwen),
    "granite4": ("granitehybrid", granite),
    "granite4-moe": ("granitehybrid", granite),
    "bamba": ("granitehybrid", bamba),
    "falcon-h1": ("falcon-h1", mamba2),
    "falcon-h1-gate-first": ("falcon-h1", mamba2),
    "jamba": ("jamba", jamba),
    "nemotron-h": ("nemotron_h", nemotron_h),
    "nemotron-3": ("nemotron_h_moe", nemotron_h),
    "nemotron-3-super": ("nemotron_h_moe", nemotron_h),
}


SEEDS = {"qwen3.5-moe": 2}
"""Seeds of tokens other than 0, for some of which float32 itself, in transformers too, is 3e-4 from float64."""


@pytest.mark.parametrize("name", FILES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    architecture, fields = FILES[name]
    save_tiny(HYBRIDS[name](), tmp_path / "hf")
    converter = Converter(tmp_path / "hf", architecture)
    tokens = tokens_for(40, SEEDS.get(name, 0))
    wanted = oracle_logits(tmp_path / "hf", tokens)
    if architecture == "falcon-h1":
        converter.found["token_embd.weight"] *= converter.config.embedding_multiplier
        converter.found["output.weight"] = converter.found["output.weight"] * converter.config.lm_head_multiplier
    model = load(converter.write(tmp_path / "tiny.gguf", fields(converter.config)))
    torch.testing.assert_close(chunked_logits(model, tokens, [23, 17]), wanted, rtol=2e-4, atol=2e-4)


def test_first_files_of_qwen3_next_hold_inputs_in_one_tensor(tmp_path: Path) -> None:
    save_tiny(HYBRIDS["qwen3-next-renormalised"](), tmp_path / "hf")
    converter = Converter(tmp_path / "hf", "qwen3next", whole_inputs=True)
    model, tokens = load(converter.write(tmp_path / "a.gguf", qwen(converter.config))), tokens_for(40)
    wanted = oracle_logits(tmp_path / "hf", tokens)
    torch.testing.assert_close(chunked_logits(model, tokens, [40]), wanted, rtol=2e-4, atol=2e-4)


@needs_extension
@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "granite4"])
def test_blocks_run_as_stored(name: str, tmp_path: Path) -> None:
    architecture, fields = FILES[name]
    save_tiny(HYBRIDS[name](), tmp_path / "hf")
    converter = Converter(tmp_path / "hf", architecture)
    path = converter.write(tmp_path / "q.gguf", fields(converter.config), Kind.Q8_0)
    model, tokens = load(path, CpuOps(1), torch.bfloat16, quantization="auto"), tokens_for(40)
    assert "Q8_0" in model.info.revision
    wanted = oracle_logits(tmp_path / "hf", tokens)
    error = (chunked_logits(model, tokens, [23, 17]) - wanted).square().mean() / wanted.var()
    assert error < 0.03


def test_a_file_without_a_mixers_tensor_is_refused(tmp_path: Path) -> None:
    save_tiny(HYBRIDS["granite4"](), tmp_path / "hf")
    converter = Converter(tmp_path / "hf", "granitehybrid")
    del converter.found["blk.2.ssm_a"]
    path = converter.write(tmp_path / "a.gguf", granite(converter.config))
    with pytest.raises(ConfigError, match=r"lack the tensor blk\.2\.ssm_a \(model\.layers\.2\.mixer\.A_log\)"):
        load(path)
