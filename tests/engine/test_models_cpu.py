"""Families on the compiled CPU kernels: equal to transformers in float32, as near to that in bfloat16 as theirs. Of
experts: the same bits in every batch, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.engine.models import load_model
from kvferry.engine.models.adapters import load_adapter
from kvferry.engine.models.decoder import Decoder
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.adapter import read_adapter
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError
from kvferry.worker.batch_invariance import require_batch_invariance
from tests.adapter_files import ATTENTION, save_adapter
from tests.engine.tiny_models import (
    EXPERTS,
    OURS,
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
SHAPED = ("gemma3n", "gemma4", "gemma4-experts")
LATENT = ("deepseek-v2", "deepseek-v2-lite", "deepseek-v3")
MIXED = (
    "glm4-moe",
    "minimax-m2",
    "qwen2-moe",
    "ernie-moe",
    "granite-moe-shared",
    "llama4",
    "llama4-dense-between",
    "phi-moe",
    "hunyuan-moe",
)
NAMES = (
    "qwen3-moe",
    "mixtral",
    "olmoe",
    "gemma2",
    "glm4",
    "cohere-plus",
    "cohere2",
    "gpt-oss",
    *SHAPED,
    *LATENT,
    *MIXED,
)
pytestmark = pytest.mark.usefixtures("one_thread")
needs_extension = pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension")


def load(path: Path, ops: Ops | None = None, dtype: torch.dtype = torch.float32) -> Decoder:
    model = load_model(resolve(str(path)), device=CPU, dtype=dtype, ops=ops or ReferenceOps(), impl="kvferry")
    assert isinstance(model, Decoder)
    return model


@needs_extension
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_the_cpu_row_equal_transformers(name: str, tmp_path: Path) -> None:
    save_tiny(OURS[name](), tmp_path)
    expect_equal_logits(load(tmp_path, CpuOps(1)), lambda tokens: oracle_logits(tmp_path, tokens), tolerance=1e-4)


@needs_extension
@pytest.mark.parametrize("name", [name for name in NAMES if name != "phi-moe"])
def test_bfloat16_is_as_near_to_float32_as_transformers_own(name: str, tmp_path: Path) -> None:
    """But for Phi-MoE, whose weights jump: there means of 24 prompts are equal, those of four are not."""
    save_tiny(OURS[name](), tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    ours = {ops.name: load(tmp_path, ops, torch.bfloat16) for ops in (ReferenceOps(), CpuOps(1))}
    errors: dict[str, list[float]] = {name: [] for name in ("theirs", *ours)}
    for seed in range(4):
        tokens = tokens_for(40, seed)
        wanted = oracle_logits(tmp_path, tokens)
        with torch.inference_mode():
            found = {"theirs": theirs(input_ids=tokens[None]).logits[0].float()}
        found |= {row: chunked_logits(model, tokens, [23, 17]) for row, model in ours.items()}
        for row, logits in found.items():
            errors[row].append(float((logits - wanted).square().mean()))
    means = {row: sum(values) for row, values in errors.items()}
    assert means["reference"] < 1.5 * means["theirs"], means
    assert means["cpu"] < 1.5 * means["theirs"], means


@needs_extension
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "gemma2", "gpt-oss", "cohere-plus"])
def test_a_token_has_the_same_bits_in_every_batch(name: str, tmp_path: Path) -> None:
    """Of a prompt in one chunk, in several, in steps of one token beside other sequences; with two threads."""
    config = OURS[name]()
    config.head_dim = config.query_pre_attn_scalar = 32
    save_tiny(config, tmp_path)
    tokens, others = tokens_for(40, 1), tokens_for(40, 2)
    whole = chunked_logits(load(tmp_path, CpuOps(1, batch_invariant=True), torch.bfloat16), tokens, [40])
    model = load(tmp_path, CpuOps(2, batch_invariant=True), torch.bfloat16)
    require_batch_invariance(model)
    assert torch.equal(chunked_logits(model, tokens, [7, 1, 20, 12]), whole)
    cache = Cache(model)
    got = [cache.step({"a": tokens[:30], "b": others[:3]})[0]]
    got += [
        cache.step({"a": tokens[i : i + 1], "b": others[i - 27 : i - 26], "c": others[:5]})[0] for i in range(30, 40)
    ]
    assert torch.equal(torch.cat(got), whole)


def test_the_hubs_name_of_the_number_of_experts(tmp_path: Path) -> None:
    """transformers 5 writes num_local_experts."""
    save_tiny(OURS["qwen3-moe"](), tmp_path)
    wanted = chunked_logits(load(tmp_path), tokens_for(20), [20])
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_experts"] = config.pop("num_local_experts")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(chunked_logits(load(tmp_path), tokens_for(20), [20]), wanted)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("qwen3-moe", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7, of 6 experts"),
        ("qwen3-moe", {"num_local_experts": 0}, "num_local_experts must be a whole number of at least 1"),
        ("qwen3-moe", {"moe_intermediate_size": 31}, r"experts.0.gate_proj.weight has shape \(32, 64\)"),
        ("qwen3-moe-one-dense", {"mlp_only_layers": []}, r"lack the tensor model.layers.1.mlp.gate.weight"),
        ("mixtral", {"num_local_experts": 5}, r"block_sparse_moe.gate.weight has shape \(4, 64\)"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
    ],
)
def test_what_does_not_fit_is_named(name: str, values: dict[str, object], words: str, tmp_path: Path) -> None:
    save_tiny(OURS[name](), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | values))
    with pytest.raises(ConfigError, match=words):
        load(tmp_path)


def test_adapters_of_experts_are_refused_by_name(tmp_path: Path) -> None:
    save_tiny(family("Qwen3MoeConfig", head_dim=16, **EXPERTS), tmp_path / "model")
    model = load(tmp_path / "model")
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    path = save_adapter(tmp_path / "a", hf, targets=ATTENTION[:4])
    tensors = load_file(path / "adapter_model.safetensors")
    load_adapter(read_adapter(str(path), 64), model)
    for module in ("mlp.experts.0.gate_proj", "mlp.experts.base_layer"):
        name = f"base_model.model.model.layers.0.{module}.lora_A.weight"
        save_file(tensors | {name: torch.zeros(4, 64)}, path / "adapter_model.safetensors")
        with pytest.raises(ConfigError, match="adapters of experts are not supported"):
            load_adapter(read_adapter(str(path), 64), model)
