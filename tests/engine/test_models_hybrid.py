"""Hybrid families: recurrent layers and attention on our decoder, against transformers' own logits."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.engine.models import load_model
from kvferry.engine.models.adapters import load_adapter
from kvferry.engine.models.decoder import Decoder
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.lora import Adapted
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.adapter import read_adapter
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError
from tests.adapter_files import merge
from tests.engine.tiny_hybrids import GRANITE, HYBRIDS, suspended_logits
from tests.engine.tiny_models import (
    Cache,
    chunked_logits,
    expect_equal_logits,
    family,
    oracle_logits,
    save_tiny,
    tokens_for,
    transformers,
)

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")
needs_extension = pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension")


def load(path: Path, ops: Ops | None = None, dtype: torch.dtype = torch.float32, **extra: Any) -> Decoder:
    model = load_model(resolve(str(path)), device=CPU, dtype=dtype, ops=ops or ReferenceOps(), impl="kvferry", **extra)
    assert isinstance(model, Decoder)
    return model


def edit(path: Path, drop: tuple[str, ...] = (), **values: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    for name in drop:
        config.pop(name, None)
    (path / "config.json").write_text(json.dumps(config | values))


SEEDS = {"qwen3-next-renormalised": 9}
"""Seeds of tokens other than 4, some of which amplify the rounding of float32."""


@pytest.mark.parametrize("name", HYBRIDS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """In one chunk, in several, token by token, packed with others; and suspended before each layer."""
    save_tiny(HYBRIDS[name](), tmp_path)
    model = load(tmp_path)
    expect_equal_logits(model, lambda tokens: oracle_logits(tmp_path, tokens))
    cache, tokens = Cache(model), tokens_for(31, SEEDS.get(name, 4))
    cache.step({"a": tokens[:12], "b": tokens_for(7, 5)})
    found = suspended_logits(cache, "a", tokens[12:], model.config.num_layers)
    torch.testing.assert_close(found, oracle_logits(tmp_path, tokens)[12:], rtol=2e-4, atol=2e-4)


ROUTED = (
    "qwen3.5-moe",
    "qwen3-next-renormalised",
    "qwen3-next-as-many-heads",
    "lfm2-moe",
    "lfm2-moe-plain",
    "jamba-biased",
    "nemotron-3",
    "nemotron-3-super",
    "nemotron-3-super-biased",
    "minimax",
)
"""Tiny mixtures whose rounded routers choose other experts now and then, in transformers as in ours."""


@needs_extension
@pytest.mark.parametrize("name", sorted(set(HYBRIDS) - set(ROUTED)))
def test_bfloat16_and_int8_on_the_cpu_row_are_near(name: str, tmp_path: Path) -> None:
    save_tiny(HYBRIDS[name](), tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    models = {
        "cpu": load(tmp_path, CpuOps(1), torch.bfloat16),
        "int8": load(tmp_path, CpuOps(1), torch.bfloat16, quantization="int8"),
    }
    errors = dict.fromkeys(("theirs", *models), 0.0)
    for seed in range(6):
        tokens = tokens_for(40, seed)
        wanted = oracle_logits(tmp_path, tokens)
        with torch.inference_mode():
            found = {"theirs": theirs(input_ids=tokens[None]).logits[0].float()}
        found |= {each: chunked_logits(model, tokens, [23, 17]) for each, model in models.items()}
        for each, logits in found.items():
            errors[each] += float((logits - wanted).square().mean() / wanted.var() / 6)
    assert errors["cpu"] < 2 * errors["theirs"], errors
    assert errors["int8"] < 0.04, errors


@pytest.mark.parametrize("name", ["lfm2", "qwen3.5"])
def test_only_layers_with_attention_have_kv(name: str, tmp_path: Path) -> None:
    config = HYBRIDS[name]()
    save_tiny(config, tmp_path)
    info = load(tmp_path).info
    assert info.num_layers == config.layer_types.count("full_attention")
    window = {"lfm2": 64 * 2, "qwen3.5": (2 * 24 + 80) * 3}[name]
    matrix = {"lfm2": 0, "qwen3.5": 4 * 12 * 20}[name]
    assert info.state_floats == 2 * (window + matrix)


def test_layers_of_lfm2_as_its_first_checkpoints_list_them(tmp_path: Path) -> None:
    save_tiny(HYBRIDS["lfm2"](), tmp_path)
    tokens = tokens_for(20)
    wanted = chunked_logits(load(tmp_path), tokens, [20])
    edit(tmp_path, drop=("layer_types",), full_attn_idxs=[1, 3], block_ff_dim=96, intermediate_size=7)
    torch.testing.assert_close(chunked_logits(load(tmp_path), tokens, [20]), wanted)


def test_a_granite_4_of_attention_alone(tmp_path: Path) -> None:
    save_tiny(family("GraniteMoeHybridConfig", **GRANITE | {"layer_types": ["full_attention"] * 3}), tmp_path)
    model = load(tmp_path)
    assert (model.info.state_floats, model.info.num_layers, model.config.hybrid) == (0, 3, None)
    expect_equal_logits(model, lambda tokens: oracle_logits(tmp_path, tokens))


def test_layers_of_nemotron_h_as_the_hub_spells_them(tmp_path: Path) -> None:
    save_tiny(HYBRIDS["nemotron-3"](), tmp_path)
    tokens = tokens_for(20)
    wanted = chunked_logits(load(tmp_path), tokens, [20])
    edit(tmp_path, drop=("layers_block_type", "layer_types"), hybrid_override_pattern="ME*E-")
    torch.testing.assert_close(chunked_logits(load(tmp_path), tokens, [20]), wanted)
    edit(tmp_path, hybrid_override_pattern="ME*EX")
    with pytest.raises(ConfigError, match="hybrid_override_pattern has 'X', not one of"):
        load(tmp_path)


def test_the_text_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    """Tensors and config as vision models hold them; heads that predict further tokens are left alone."""
    config = HYBRIDS["qwen3.5"]()
    save_tiny(config, tmp_path)
    tokens = tokens_for(20)
    wanted = chunked_logits(load(tmp_path), tokens, [20])
    tensors = load_file(tmp_path / "model.safetensors")
    nested = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    nested |= {"model.visual.patch_embed.weight": torch.ones(3, 3), "mtp.norm.weight": torch.ones(3)}
    save_file(nested, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 1}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    torch.testing.assert_close(chunked_logits(load(tmp_path), tokens, [20]), wanted)


def test_experts_in_one_tensor_and_each_by_itself(tmp_path: Path) -> None:
    """Qwen3.5's mixtures are stored both ways."""
    save_tiny(HYBRIDS["qwen3.5-moe"](), tmp_path)
    tokens = tokens_for(20)
    wanted = chunked_logits(load(tmp_path), tokens, [20])
    tensors = load_file(tmp_path / "model.safetensors")
    part = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
    single = sorted(name for name in tensors if part.fullmatch(name))
    if single:
        for layer in {part.fullmatch(name)[1] for name in single}:
            count = sum(name.startswith(f"{layer}.") for name in single) // 3
            each = {
                kind: [tensors.pop(f"{layer}.{index}.{kind}_proj.weight") for index in range(count)]
                for kind in ("gate", "up", "down")
            }
            both = [torch.cat(pair) for pair in zip(each["gate"], each["up"], strict=True)]
            tensors |= {f"{layer}.gate_up_proj": torch.stack(both), f"{layer}.down_proj": torch.stack(each["down"])}
    else:
        for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
            layer, down = name.removesuffix(".gate_up_proj"), tensors.pop(name.replace("gate_up", "down"))
            for index, (both, last) in enumerate(zip(tensors.pop(name), down, strict=True)):
                gate, up = (half.contiguous() for half in both.chunk(2))
                for kind, tensor in (("gate", gate), ("up", up), ("down", last.contiguous())):
                    tensors[f"{layer}.{index}.{kind}_proj.weight"] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    torch.testing.assert_close(chunked_logits(load(tmp_path), tokens, [20]), wanted)


def adapter(path: Path, model: torch.nn.Module, targets: tuple[str, ...]) -> Path:
    """A random adapter of those of the model's dense layers that are called so."""
    path.mkdir()
    numbers, tensors = torch.Generator().manual_seed(3), {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets and not any(part in name for part in (".conv.", "linear_attn", "mamba")):
            for part, shape in (("A", (4, module.weight.shape[1])), ("B", (module.weight.shape[0], 4))):
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = torch.randn(shape, generator=numbers) * 0.1
    save_file(tensors, path / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "target_modules": list(targets), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(facts))
    return path


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("lfm2", ("q_proj", "k_proj", "v_proj", "out_proj", "w1", "w3", "w2")),
        ("qwen3.5", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
        ("falcon-h1", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    ],
)
def test_an_adapter_equals_merged_weights(name: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    save_tiny(HYBRIDS[name](), tmp_path)
    model = load(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    path = adapter(tmp_path / "adapter", theirs, targets)
    own, tokens = load_adapter(read_adapter(str(path), 8), model), tokens_for(24)
    with torch.inference_mode():
        wanted = merge(theirs.eval(), path)(input_ids=tokens[None]).logits[0]
    forward = model.forward

    def adapted(token_ids, kv, plan, *rest):
        rows = torch.arange(len(token_ids))
        return forward(token_ids, kv, replace(plan, adapted=(Adapted(own, rows),)), *rest)

    model.forward = adapted  # type: ignore[method-assign]
    torch.testing.assert_close(chunked_logits(model, tokens, [13, 11]), wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        ("model.layers.0.self_attn.q_proj", "adapts q_proj of layer 0, which has no attention"),
        ("model.layers.0.conv.out_proj", "adapters of recurrent layers are not supported"),
    ],
)
def test_adapters_that_do_not_fit(tensor: str, told: str, tmp_path: Path) -> None:
    save_tiny(HYBRIDS["lfm2"](), tmp_path)
    path = tmp_path / "adapter"
    path.mkdir()
    parts = {f"base_model.model.{tensor}.lora_{part}.weight": torch.ones(2, 2) for part in "AB"}
    save_file(parts, path / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "r": 2, "lora_alpha": 8.0, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match=told):
        load_adapter(read_adapter(str(path), 8), load(tmp_path))


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        (
            "lfm2",
            {"layer_types": ["conv", "ring", "conv", "conv"]},
            r"layer_types\[1\] is 'ring', not one of attention,",
        ),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layer_types has 2 entries for 4 layers"),
        ("lfm2", {"layer_types": ["conv"] * 4}, "no layer has attention"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache must be 2 to 64, got 1"),
        ("lfm2", {"block_ffn_dim_multiplier": 2.0}, "has shape"),
        ("qwen3.5", {"linear_num_key_heads": 3}, "linear_num_key_heads is 3, which does not divide"),
        ("granite4", {"time_step_limit": 7}, "time_step_limit must be two numbers, got 7"),
        ("granite4", {"mamba_n_heads": 7}, "mamba_n_heads 7 of mamba_d_head 16 do not make up the width of 128"),
        ("bamba", {"mamba_n_groups": 3}, "mamba_n_groups is 3, which does not divide the number of heads, 8"),
        ("falcon-h1", {"mlp_multipliers": [1.0]}, r"mlp_multipliers must have 2 numbers, got \[1.0\]"),
        ("falcon-h1", {"key_multiplier": "x"}, "key_multiplier must be a number of at least 0, got 'x'"),
        ("lfm2", {"layer_types": 7}, "layer_types must be a list, got 7"),
        ("bamba", {"attn_layer_indices": 1.5}, "attn_layer_indices must be a list, got 1.5"),
        ("lfm2-moe", {"num_dense_layers": "x"}, "num_dense_layers must be a number of at least 0, got 'x'"),
        ("minimax", {"mlp_alpha_factor": "x"}, "mlp_alpha_factor must be a number of at least 0, got 'x'"),
        ("lfm2-moe", {"use_expert_bias": False}, "use_expert_bias must be true"),
        ("nemotron-3", {"moe_latent_size": -8}, "moe_latent_size must be a whole number of at least 1, got -8"),
        ("minimax", {"mlp_beta_factor": 2}, "mlp_beta_factor must be 1, got 2"),
        ("jamba", {"mamba_dt_rank": 0}, "mamba_dt_rank must be a whole number of at least 1, got 0"),
        ("qwen3.5", {"linear_key_head_dim": -4}, "linear_key_head_dim must be a whole number of at least 1"),
    ],
)
def test_configs_that_are_refused(name: str, values: dict[str, Any], told: str, tmp_path: Path) -> None:
    save_tiny(HYBRIDS[name](), tmp_path)
    edit(tmp_path, **values)
    with pytest.raises(ConfigError, match=told):
        load(tmp_path)


def test_dummy_weights_of_a_hybrid_model(tmp_path: Path) -> None:
    """Their logits are finite and tell tokens apart."""
    save_tiny(HYBRIDS["qwen3.5"](), tmp_path)
    logits = chunked_logits(load(tmp_path, load_format="dummy"), tokens_for(20), [20])
    assert logits.isfinite().all()
    assert logits.std(0).min() > 0
