"""Dense families on our decoder against transformers' own logits: every shape that a family has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.engine.models import load_model
from kvferry.engine.models.adapters import load_adapter
from kvferry.engine.models.config import Temperature
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.models.families import FAMILIES
from kvferry.engine.models.implementation import OWN, implementation_of
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.adapter import read_adapter
from kvferry.model_files.memory_needs import config_needs, model_needs
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError
from tests.adapter_files import ATTENTION, merge, save_adapter
from tests.engine.joined_ranks import expect_equal, joined_ranks, whole
from tests.engine.test_adapters import adapter_of, hf, wearing
from tests.engine.tiny_dense_families import DENSE
from tests.engine.tiny_models import (
    chunked_logits,
    expect_equal_logits,
    oracle_logits,
    save_tiny,
    tokens_for,
    transformers,
)

CPU = torch.device("cpu")
QKV, MLP = ATTENTION[:3], ("gate_proj", "up_proj", "down_proj")
MLPS = {
    "glm": ("o_proj", "gate_up_proj", "down_proj"),
    "starcoder2": ("o_proj", "c_fc", "c_proj"),
    "phi": ("fc1", "fc2"),
    **{name: ("o_proj", "up_proj", "down_proj") for name in ("arcee", "apertus", "nemotron")},
}
"""Targets of adapters beside q, k and v where they have other names."""
NATIVE = (
    *("glm-partial", "ernie4_5-biased", "seed_oss", "exaone4", "hunyuan_v1_dense", "ministral", "ministral3"),
    *("arcee-biased", "apertus", "nemotron-biased", "olmo-clipped", "stablelm-parallel", "stablelm-qk-norm"),
    *("starcoder2", "phi", "helium"),
)
needs_extension = pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension")
pytestmark = pytest.mark.usefixtures("one_thread")


def load(path: Path, ops: Ops | None = None, dtype: torch.dtype = torch.float32, **extra: Any) -> Decoder:
    model = load_model(resolve(str(path)), device=CPU, dtype=dtype, ops=ops or ReferenceOps(), **extra)
    assert isinstance(model, Decoder)
    return model


def edit_config(path: Path, **values: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | values))


@pytest.mark.parametrize("name", DENSE)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    save_tiny(DENSE[name](), tmp_path)
    model = load(tmp_path)
    assert model.config.model_type == name.partition("-")[0]
    expect_equal_logits(model, lambda tokens: oracle_logits(tmp_path, tokens))


@needs_extension
@pytest.mark.parametrize("name", NATIVE)
def test_logits_of_the_cpu_row_equal_transformers(name: str, tmp_path: Path) -> None:
    save_tiny(DENSE[name](), tmp_path)
    expect_equal_logits(load(tmp_path, CpuOps(1)), lambda tokens: oracle_logits(tmp_path, tokens), tolerance=1e-4)


@needs_extension
@pytest.mark.parametrize("name", NATIVE)
def test_bfloat16_is_as_near_to_float32_as_transformers_own(name: str, tmp_path: Path) -> None:
    """And int8 is near to it; a step of families that are plain is recorded."""
    save_tiny(DENSE[name](), tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    ours = load(tmp_path, CpuOps(1), torch.bfloat16)
    assert (ours._step is not None) == (FAMILIES[ours.config.model_type].plain and ours.config.head_dim == 32)
    coded = load(tmp_path, CpuOps(1), torch.bfloat16, quantization="int8")
    assert coded.info.revision == f"{ours.info.revision}+INT8"
    errors: dict[str, float] = {"theirs": 0.0, "ours": 0.0}
    for seed in range(4):
        tokens = tokens_for(40, seed)
        wanted = oracle_logits(tmp_path, tokens)
        with torch.inference_mode():
            errors["theirs"] += float((theirs(input_ids=tokens[None]).logits[0] - wanted).square().mean())
        errors["ours"] += float((chunked_logits(ours, tokens, [23, 1, 16]) - wanted).square().mean())
        both = torch.stack((chunked_logits(coded, tokens, [23, 1, 16]).flatten(), wanted.flatten()))
        assert torch.corrcoef(both)[0, 1] > 0.99
    assert errors["ours"] < 1.6 * errors["theirs"], errors


@pytest.mark.parametrize("name", [each for each in DENSE if "-" not in each])
def test_logits_with_an_adapter_equal_those_of_merged_weights(name: str, tmp_path: Path) -> None:
    save_tiny(DENSE[name](), tmp_path / "model")
    path = save_adapter(tmp_path / "a", hf(tmp_path / "model"), targets=(*QKV, *MLPS.get(name, MLP)))
    merged = merge(hf(tmp_path / "model"), path)
    model = load(tmp_path / "model")
    plain = chunked_logits(model, tokens_for(45, 1), [45])
    model = wearing(model, adapter_of(path, model))

    def oracle(tokens: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return merged(input_ids=tokens[None]).logits[0].float()  # type: ignore[no-any-return]

    expect_equal_logits(model, oracle)
    assert (chunked_logits(model, tokens_for(45, 1), [45]) - plain).abs().max() > 0.3, "the adapter must matter"


@pytest.mark.parametrize(
    "name",
    ["glm", "arcee-biased", "apertus", "nemotron-biased", "olmo-clipped", "stablelm-qk-norm", "starcoder2", "phi"],
)
def test_two_ranks_compute_what_one_process_does(name: str, tmp_path: Path) -> None:
    save_tiny(DENSE[name](), tmp_path)
    with joined_ranks(tmp_path, 2) as ranks:
        expect_equal(ranks, whole(tmp_path))


def test_an_adapter_of_a_gate_that_is_not_there_is_refused(tmp_path: Path) -> None:
    save_tiny(DENSE["seed_oss"](), tmp_path / "gated")
    save_tiny(DENSE["arcee"](), tmp_path / "model")
    path = save_adapter(tmp_path / "a", hf(tmp_path / "gated"), targets=("gate_proj",))
    with pytest.raises(ConfigError, match="its target gate_proj is not one of"):
        load_adapter(read_adapter(str(path), 64), load(tmp_path / "model"))


@pytest.mark.parametrize("name", DENSE)
def test_needs_follow_from_the_config_alone(name: str, tmp_path: Path) -> None:
    """As from the files' headers."""
    save_tiny(DENSE[name](), tmp_path)
    needs = model_needs(resolve(str(tmp_path)))
    assert needs == config_needs(json.loads((tmp_path / "config.json").read_text()), max_model_len=needs.max_model_len)
    assert needs.own
    model = load(tmp_path)
    assert (needs.kv_heads, needs.head_dim) == (model.config.num_kv_heads, model.config.head_dim)
    assert needs.layout("float32", 8) == model.info.layout(torch.float32, 8)


def test_what_a_route_says(tmp_path: Path) -> None:
    for name in ("arcee", "olmo"):
        save_tiny(DENSE[name](), tmp_path / name)
        assert implementation_of(resolve(str(tmp_path / name))).path == OWN


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("nemotron", {"norm_eps": "small"}, "norm_eps must be a number of at least 0, got 'small'"),
        ("starcoder2", {"norm_epsilon": -1.0}, "norm_epsilon must be a number of at least 0, got -1.0"),
        ("starcoder2", {"hidden_act": "silu"}, "activation 'silu'"),
        ("arcee", {"hidden_act": "xielu"}, r"lack the tensor model.layers.0.mlp.act_fn.alpha_p"),
        ("apertus", {"hidden_act": "tanh"}, "activation 'tanh'"),
        ("arcee", {"mlp_bias": True}, r"lack the tensor model.layers.0.mlp.up_proj.bias"),
        ("olmo", {"clip_qkv": "wide"}, "clip_qkv must be a number of at least 0, got 'wide'"),
        ("olmo", {"clip_qkv": True}, "clip_qkv must be a number of at least 0, got True"),
        ("stablelm", {"qk_layernorm": True}, r"lack the tensor model.layers.0.self_attn.q_norm.weight"),
        ("stablelm-parallel", {"use_parallel_residual": False}, r"lack the tensor model.layers.0.post_attention"),
        ("starcoder2", {"intermediate_size": 95}, r"mlp.up_proj.bias has shape \(96,\)"),
        ("exaone4", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 5 layers"),
        ("exaone4", {"layer_types": 7}, "layer_types must be a list, got 7"),
        (
            "exaone4",
            {"layer_types": None, "sliding_window_pattern": "LLX"},
            "sliding_window_pattern must be a positive number or letters L and G, got 'LLX'",
        ),
        (
            "hunyuan_v1_dense",
            {"rope_parameters": {"rope_type": "dynamic", "alpha": -3.0, "rope_theta": 500.0}},
            "alpha must be a number of at least 0, got -3.0",
        ),
        (
            "hunyuan_v1_dense",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0}},
            "rope scaling 'yarn' before norms of q and k",
        ),
        (
            "ministral3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "llama_4_scaling_beta": "hot"}},
            "llama_4_scaling_beta must be a number of at least 0, got 'hot'",
        ),
        ("phi", {"qk_layernorm": True}, "qk_layernorm"),
    ],
)
def test_what_does_not_fit_is_named(name: str, values: dict[str, object], words: str, tmp_path: Path) -> None:
    save_tiny(DENSE[name](), tmp_path)
    edit_config(tmp_path, **values)
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, impl="kvferry")


def test_the_windows_of_exaone_as_the_hub_spells_them(tmp_path: Path) -> None:
    """Letters in place of a list of layers; the last layer has no window, and layers without one do not rotate."""
    save_tiny(DENSE["exaone4"](), tmp_path)
    edit_config(tmp_path, layer_types=None, sliding_window_pattern="LLG")
    config = load(tmp_path).config
    assert config.windows == (9, 9, 0, 9, 0)
    assert config.rotated == (True, True, False, True, False)
    edit_config(tmp_path, layer_types=None, sliding_window_pattern=2)
    assert load(tmp_path).config.windows == (9, 0, 9, 0, 9)


def test_a_context_within_the_original_one_has_no_temperature(tmp_path: Path) -> None:
    """Its steps stay recorded; longer ones are computed layer by layer, with the same tokens."""
    save_tiny(DENSE["ministral3"](), tmp_path)
    model = load(tmp_path)
    assert model._temperatures is not None
    assert torch.equal(model._temperatures[:16], torch.ones(16))
    assert (model._temperatures[16:].diff() >= 0).all()
    assert model.config.temperature == Temperature(0.3, 16)


def test_the_text_of_a_multimodal_ministral(tmp_path: Path) -> None:
    """Mistral 3 with the text model of Ministral 3."""
    save_tiny(DENSE["ministral3"](), tmp_path / "text")
    tokens = tokens_for(40)
    wanted = chunked_logits(load(tmp_path / "text"), tokens, [40])
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    whole = {"model_type": "mistral3", "text_config": config, "vision_config": {"model_type": "pixtral"}}
    folder = tmp_path / "whole"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    save_file({f"language_model.{name}": each for name, each in tensors.items()}, folder / "model.safetensors")
    assert torch.equal(chunked_logits(load(folder), tokens, [40]), wanted)
