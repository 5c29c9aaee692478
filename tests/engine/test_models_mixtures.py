"""Mixtures of experts: configs as the hub spells them, layers that are not run, memory needs, and damaged configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.engine.models import load_model
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.models.implementation import OWN, implementation_of
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.decoder_spec import Experts
from kvferry.kernels.linear import Linear
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.memory_needs import config_needs, model_needs
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError
from tests.engine.quantised_files import fp8, quantise
from tests.engine.test_models_gguf import same_logits
from tests.engine.test_models_packed import CPU, correlation
from tests.engine.tiny_models import LONGROPE, OURS, chunked_logits, oracle_logits, save_tiny, tokens_for

pytestmark = pytest.mark.usefixtures("one_thread")
MIXTURES = [name for name in OURS if "-moe" in name or name.startswith(("minimax", "llama4"))]
"""Names of tiny models."""


def load(path: Path, impl: str = "auto") -> Decoder:
    model = load_model(
        resolve(str(path)), device=torch.device("cpu"), dtype=torch.float32, ops=ReferenceOps(), impl=impl
    )
    assert isinstance(model, Decoder)
    return model


def edited(path: Path, **values: Any) -> Path:
    """The config with these fields; None: without them."""
    config = json.loads((path / "config.json").read_text()) | values
    config = {name: value for name, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", MIXTURES)
def test_needs_are_what_is_loaded(name: str, tmp_path: Path) -> None:
    save_tiny(OURS[name](), tmp_path)
    assert implementation_of(resolve(str(tmp_path))).path == OWN
    model, needs = load(tmp_path), model_needs(resolve(str(tmp_path)))
    weights = active = 0.0
    for layer in model.parameters.layers:
        mlp = layer.mlp
        experts = [each for each in mlp.each if each is not None] if isinstance(mlp, Experts) else []
        chosen = {id(linear) for each in experts for linear in each.dense_layers()}
        share = mlp.routing.chosen / len(experts) if isinstance(mlp, Experts) else 1.0
        for linear in layer.dense_layers():
            weights += _size(linear)
            active += _size(linear) * (share if id(linear) in chosen else 1.0)
    corrections = sum(64 for layer in model.parameters.layers if getattr(layer.mlp, "correction", None) is not None)
    assert needs.dense.weights == pytest.approx(weights, abs=corrections)  # Ernie's are matrices of one row
    assert needs.dense.active == pytest.approx(active, abs=corrections)
    told = config_needs(json.loads((tmp_path / "config.json").read_text()))
    routers = 64 * 8 * needs.layers + 64 * needs.layers
    assert told.dense.weights == pytest.approx(needs.dense.weights, abs=routers + corrections)
    assert (told.experts, told.own, told.kv_bytes("bfloat16")) == (needs.experts, True, needs.kv_bytes("bfloat16"))


def _size(linear: Linear) -> int:
    weight: torch.Tensor = linear.weight  # type: ignore[attr-defined]
    return weight.numel()


@pytest.mark.parametrize("name", ["glm4-moe", "minimax-m2"])
def test_layers_that_predict_further_tokens_are_not_read(name: str, tmp_path: Path) -> None:
    save_tiny(OURS[name](), tmp_path)
    wanted, needs = chunked_logits(load(tmp_path), tokens_for(20), [20]), model_needs(resolve(str(tmp_path)))
    tensors = load_file(tmp_path / "model.safetensors")
    further = {f"model.layers.3.{part}.weight": torch.ones(64, 64) for part in ("eh_proj", "mlp.experts.0.up_proj")}
    save_file(tensors | further, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.equal(chunked_logits(load(tmp_path), tokens_for(20), [20]), wanted)
    assert model_needs(resolve(str(tmp_path))) == needs


def test_minimax_names_its_rotated_dims(tmp_path: Path) -> None:
    save_tiny(OURS["minimax-m2"](), tmp_path)
    wanted = chunked_logits(load(tmp_path), tokens_for(20), [20])
    edited(tmp_path, rope_parameters=None, rope_theta=500.0, rotary_dim=16, scoring_func="sigmoid", use_qk_norm=True)
    assert torch.equal(chunked_logits(load(tmp_path), tokens_for(20), [20]), wanted)


def test_glm_names_its_rotated_share_at_the_top(tmp_path: Path) -> None:
    save_tiny(OURS["glm4-moe"](), tmp_path)
    wanted = chunked_logits(load(tmp_path), tokens_for(20), [20])
    theta = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]["rope_theta"]
    edited(tmp_path, rope_parameters=None, rope_theta=theta, partial_rotary_factor=0.5, num_nextn_predict_layers=1)
    assert torch.equal(chunked_logits(load(tmp_path), tokens_for(20), [20]), wanted)


def test_ernies_last_layer_with_experts(tmp_path: Path) -> None:
    save_tiny(OURS["ernie-moe"](), tmp_path)
    edited(tmp_path, moe_layer_end_index=2)
    with pytest.raises(ConfigError, match=r"lack the tensor model\.layers\.3\.mlp\.gate_proj"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("glm4-moe", {"n_group": 3}, "3 of 8 experts cannot be chosen in 2 of 3 groups"),
        ("glm4-moe", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("glm4-moe", {"n_shared_experts": 2}, r"shared_experts\.gate_proj\.weight has shape \(32, 64\)"),
        ("minimax-m2", {"rotary_dim": "half"}, "rotary_dim must be a whole number"),
        ("minimax-m2", {"num_local_experts": 7}, r"block_sparse_moe\.gate\.weight has shape \(6, 64\)"),
        ("qwen2-moe", {"shared_expert_intermediate_size": "wide"}, "shared_expert_intermediate_size must be a whole"),
        ("ernie-moe", {"moe_k": 9}, "num_experts_per_tok is 9, of 6 experts"),
        ("ernie-moe", {"moe_k": [2, 3]}, "moe_k differs between layers"),
        (
            "granite-moe",
            {"intermediate_size": 80},
            r"gate_proj\.weight has shape \(96, 64\), the config says \(80, 64\)",
        ),
        ("granite-moe-shared", {"shared_intermediate_size": 39}, r"shared_mlp\.gate_proj\.weight has shape \(40, 64\)"),
        ("llama4", {"no_rope_layers": [1]}, "no_rope_layers has 1 marks for 4 layers"),
        ("llama4", {"layer_types": ["chunked_attention"]}, "layer_types has 1 of 4 layers"),
        ("llama4", {"attention_chunk_size": "long"}, "attention_chunk_size must be a whole number"),
        ("llama4", {"floor_scale": -1}, "floor_scale must be a whole number"),
        ("llama4", {"attn_scale": "much"}, "attn_scale must be a number"),
        ("llama4", {"num_local_experts": 5}, r"router\.weight has shape \(4, 64\)"),
    ],
)
def test_what_does_not_fit_is_named(name: str, values: dict[str, Any], words: str, tmp_path: Path) -> None:
    save_tiny(OURS[name](), tmp_path)
    edited(tmp_path, **values)
    with pytest.raises(ConfigError, match=words) as caught:
        load(tmp_path, "kvferry")
    assert caught.value.param == "model"


def test_chunked_attention_runs_on_our_decoder_alone(tmp_path: Path) -> None:
    save_tiny(OURS["llama4"](), tmp_path)
    with pytest.raises(ConfigError, match="chunked attention runs only on kvferry's own decoder"):
        load(tmp_path, "transformers")


@pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension")
@pytest.mark.parametrize("name", ["glm4-moe-plain", "minimax-m2", "granite-moe-shared", "llama4"])
def test_int8_is_near(name: str, tmp_path: Path) -> None:
    save_tiny(OURS[name](), tmp_path)
    model = load_model(resolve(str(tmp_path)), device=CPU, dtype=torch.bfloat16, ops=CpuOps(1), quantization="int8")
    exact = load(tmp_path)
    assert model.info.revision == f"{exact.info.revision}+INT8"
    assert correlation(model, exact) > 0.97  # tokens on the brink choose other experts


@pytest.mark.parametrize("name", ["minimax-m2", "glm4-moe-plain"])
def test_blocks_of_fp8_have_the_values_of_their_codes(name: str, tmp_path: Path) -> None:
    """As MiniMax-M2 and GLM-4.5-Air-FP8 are published; routers are plain."""
    save_tiny(OURS[name](), tmp_path / "plain")
    stored = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 64]}
    plain, codes, values = (tmp_path / folder for folder in ("plain", "codes", "values"))
    quantise(plain, codes, values, fp8("block", "weight_scale_inv"), stored)
    tensors = load_file(plain / "model.safetensors")
    routers = {key: tensor for key, tensor in tensors.items() if key.endswith(".gate.weight")}
    for folder in (codes, values):
        held = load_file(folder / "model.safetensors")
        held = {key: tensor for key, tensor in held.items() if not key.endswith(".gate.weight_scale_inv")} | routers
        save_file(held, folder / "model.safetensors", {"format": "pt"})
    assert implementation_of(resolve(str(codes))).path == OWN
    same_logits(load(codes), values, tolerance=1e-5)


def test_phi_moe_beyond_its_original_length(tmp_path: Path) -> None:
    """Of its two factors of attention the second applies; frequencies are compared where both have the same."""
    config = OURS["phi-moe"]()
    rope = LONGROPE | {"short_mscale": 1.2, "long_mscale": 1.3, "original_max_position_embeddings": 32}
    config.rope_parameters = rope | {"short_factor": LONGROPE["long_factor"]}
    save_tiny(config, tmp_path)
    tokens = tokens_for(60)
    wanted = oracle_logits(tmp_path, tokens)
    torch.testing.assert_close(chunked_logits(load(tmp_path), tokens, [30, 30]), wanted, rtol=2e-4, atol=2e-4)
    short = load_model(resolve(str(tmp_path)), device=CPU, dtype=torch.float32, ops=ReferenceOps(), max_model_len=32)
    wanted = oracle_logits(tmp_path, tokens[:32])
    torch.testing.assert_close(chunked_logits(short, tokens[:32], [32]), wanted, rtol=2e-4, atol=2e-4)


def test_fields_of_hunyuan_for_each_layer(tmp_path: Path) -> None:
    save_tiny(OURS["hunyuan-moe"](), tmp_path)
    wanted = chunked_logits(load(tmp_path), tokens_for(20), [20])
    edited(tmp_path, moe_topk=[3] * 3, moe_intermediate_size=[96] * 3, num_shared_expert=[1] * 3)
    assert torch.equal(chunked_logits(load(tmp_path), tokens_for(20), [20]), wanted)
    edited(tmp_path, moe_topk=[3, 3, 2])
    with pytest.raises(ConfigError, match="moe_topk differs between layers"):
        load(tmp_path)


def test_a_bias_of_tied_words_is_refused_by_name(tmp_path: Path) -> None:
    save_tiny(OURS["ernie-moe-biased"](), tmp_path)
    edited(tmp_path, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="use_bias with tied embeddings"):
        load(tmp_path, "kvferry")
