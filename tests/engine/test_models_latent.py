"""DeepSeek V2 and V3 as the hub has them: their spelling of configs, codes in blocks, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.engine.models import load_model
from kvferry.engine.models.adapters import load_adapter
from kvferry.engine.models.decoder import Decoder
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.decoder_spec import Experts, Latent
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import ReferenceOps
from kvferry.kernels.torch_operations import TorchLinear
from kvferry.model_files.adapter import read_adapter
from kvferry.model_files.memory_needs import config_needs, model_needs
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError
from tests.adapter_files import save_adapter
from tests.engine.quantised_files import fp8, quantise
from tests.engine.tiny_models import OURS, chunked_logits, save_tiny, tokens_for, transformers

CPU = torch.device("cpu")
CHUNKS = [21, 4, 1, 1, 13]
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 64]}
V3 = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")
needs_extension = pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension")


def load(path: Path, ops: Ops | None = None, dtype: torch.dtype = torch.float32, **extra: Any) -> Decoder:
    model = load_model(resolve(str(path)), device=CPU, dtype=dtype, ops=ops or ReferenceOps(), **extra)
    assert isinstance(model, Decoder)
    return model


def edit(path: Path, gone: tuple[str, ...] = (), **values: object) -> None:
    config = json.loads((path / "config.json").read_text()) | values
    (path / "config.json").write_text(json.dumps({name: each for name, each in config.items() if name not in gone}))


@pytest.fixture(params=["deepseek-v2", "deepseek-v3"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save_tiny(OURS[request.param](), tmp_path / "model")
    return tmp_path / "model"


def test_the_hubs_spelling_and_layers_that_predict_further_tokens(path: Path) -> None:
    tokens = tokens_for(40)
    wanted, needs = chunked_logits(load(path), tokens, CHUNKS), model_needs(resolve(str(path)))
    config = json.loads((path / "config.json").read_text())
    rope = config["rope_parameters"]
    sigmoid = config["model_type"] == "deepseek_v3"
    edit(
        path, ("rope_parameters", "head_dim", "qk_head_dim", "rope_interleave", "mlp_bias"),
        rope_theta=rope.pop("rope_theta"), rope_scaling={**rope, "type": rope.pop("rope_type")}, moe_layer_freq=1,
        scoring_func="sigmoid" if sigmoid else "softmax", num_nextn_predict_layers=1, ep_size=1,
        topk_method="noaux_tc" if sigmoid else "group_limited_greedy",
    )  # fmt: skip
    tensors = load_file(path / "model.safetensors")
    further = {"model.layers.3.self_attn.q_b_proj.weight": torch.zeros(96, 20)}
    save_file(tensors | further, path / "model.safetensors", {"format": "pt"})
    assert torch.equal(chunked_logits(load(path), tokens, CHUNKS), wanted)
    assert model_needs(resolve(str(path))) == needs


def test_layers_are_what_the_config_says(path: Path) -> None:
    first, *others = load(path).parameters.layers
    assert all(isinstance(layer.attention, Latent) for layer in (first, *others))
    assert not isinstance(first.mlp, Experts)
    assert all(isinstance(layer.mlp, Experts) and layer.mlp.shared for layer in others)


def test_routers_compute_in_float32_whatever_the_model_does(path: Path) -> None:
    layers = load(path, dtype=torch.bfloat16).parameters.layers
    routers = [cast("TorchLinear", layer.mlp.router) for layer in layers if isinstance(layer.mlp, Experts)]
    assert {each.weight.dtype for each in routers} == {torch.float32}


def fp8_blocks(path: Path) -> tuple[Path, Path]:
    """A checkpoint in fp8, and one of the values that it then has."""
    stored, values = path.parent / "stored", path.parent / "values"
    quantise(path, stored, values, fp8("block", "weight_scale_inv"), BLOCKS)
    return stored, values


def test_fp8_in_blocks_is_read(path: Path) -> None:
    stored, values = fp8_blocks(path)
    tokens = tokens_for(40)
    found, wanted = (chunked_logits(load(each), tokens, CHUNKS) for each in (stored, values))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert (wanted - chunked_logits(load(path), tokens, CHUNKS)).abs().max() > 0.01


@needs_extension
@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_eight_bits_run_packed(quantization: str, path: Path) -> None:
    stored, values = fp8_blocks(path)
    tokens, source = tokens_for(40), stored if quantization == "auto" else values
    model = load(source, CpuOps(1), torch.bfloat16, quantization=quantization)
    assert model.info.revision.endswith("+Q8_0" if quantization == "auto" else "+INT8")
    wanted = chunked_logits(load(values), tokens, CHUNKS)
    plain = chunked_logits(load(values, CpuOps(1), torch.bfloat16), tokens, CHUNKS)
    found = chunked_logits(model, tokens, CHUNKS)
    assert (found - wanted).square().mean() < 4 * (plain - wanted).square().mean() + 0.02 * wanted.var()


def test_dummy_weights(path: Path) -> None:
    tokens = tokens_for(20)
    logits = [chunked_logits(load(path, load_format="dummy"), tokens, [20]) for _ in range(2)]
    assert torch.equal(*logits)
    assert logits[0].isfinite().all()


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method 'greedy'"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("deepseek-v2", {"mlp_bias": True}, "mlp_bias"),
        ("deepseek-v3", {"n_group": 3}, "3 of 8 experts cannot be chosen in 2 of 3 groups"),
        ("deepseek-v3", {"n_group": 8, "topk_group": 4}, "3 of 8 experts cannot be chosen in 4 of 8 groups"),
        ("deepseek-v2", {"topk_group": 1}, "3 of 8 experts cannot be chosen in 1 of 4 groups"),
        ("deepseek-v3", {"n_group": None}, "n_group must be a whole number"),
        ("deepseek-v2", {"qk_rope_head_dim": 0}, "qk_rope_head_dim must be a whole number"),
        ("deepseek-v3", {"kv_lora_rank": 32}, r"kv_b_proj.weight has shape \(112, 24\), the config says \(112, 32\)"),
    ],
)
def test_what_does_not_fit_is_named(name: str, values: dict[str, Any], words: str, tmp_path: Path) -> None:
    save_tiny(OURS[name](), tmp_path)
    edit(tmp_path, **values)
    with pytest.raises(ConfigError, match=words):
        load(tmp_path)


def test_adapters_are_refused(path: Path) -> None:
    model = load(path)
    hf = transformers.AutoModelForCausalLM.from_pretrained(path)
    adapter = save_adapter(path.parent / "a", hf, targets=("o_proj",))
    with pytest.raises(ConfigError, match="adapters of latent attention"):
        load_adapter(read_adapter(str(adapter), 64), model)


def test_what_the_published_model_asks_of_a_machine() -> None:
    """671 billion weights of which 37 meet a token, and 70 kB of cache for each (DeepSeek-V3, 2024)."""
    needs = config_needs(V3)
    assert needs.parameters == pytest.approx(671e9, rel=0.001)
    assert needs.dense.active + needs.head.weights == pytest.approx(37e9, rel=0.02)
    assert needs.kv_bytes("bfloat16") == 61 * 576 * 2
