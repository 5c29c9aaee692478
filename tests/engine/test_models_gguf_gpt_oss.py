"""GGUF files of gpt-oss, plain and with experts in MXFP4, against the same model in safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kvferry.engine.models import load_model
from kvferry.engine.models.dequantise import dequantise, stored_bytes
from kvferry.engine.models.implementation import OWN, implementation_of
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.memory_needs import model_needs
from kvferry.model_files.source import read_facts, resolve
from kvferry.protocol.errors import ConfigError
from tests.engine.test_models_gguf import CPU, Kind, load, same_logits
from tests.engine.test_models_packed import correlation
from tests.engine.test_models_stacked import mxfp4, plain  # noqa: F401
from tests.engine.tiny_models import GPT_OSS, family, save_tiny
from tests.gguf_files import finish, gguf_name

pytestmark = pytest.mark.usefixtures("one_thread")
OWN_NAMES = {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"}
TOKENS = ["a", "<|return|>", "b", "<|end|>", "<|call|>", "<|endoftext|>"]


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Plain tensors by their names in a GGUF, where gate and up of experts lie apart and outputs come first."""
    found: dict[str, np.ndarray] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        front, _, rest = name.partition(".mlp.experts.")
        if name.endswith(".sinks"):
            found[f"blk.{name.split('.')[2]}.attn_sinks.weight"] = value.numpy()
        elif not rest:
            found[gguf_name(name, OWN_NAMES)] = value.numpy()
        else:
            kind = "bias" if rest.endswith("_bias") else "weight"
            rows = value if kind == "bias" else value.transpose(1, 2)
            parts = {"gate": rows[:, 0::2], "up": rows[:, 1::2]} if "gate_up" in rest else {"down": rows}
            for part, each in parts.items():
                found[f"blk.{front.rsplit('.', 1)[1]}.ffn_{part}_exps.{kind}"] = each.contiguous().numpy()
    return found


def write(path: Path, folder: Path, *, experts: Kind = Kind.F32, eos: int = 1, without: str = "") -> Path:
    config = json.loads((folder / "config.json").read_text())
    rope = config["rope_parameters"]
    writer = gguf.GGUFWriter(str(path), "gpt-oss")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_token_list(TOKENS)
    writer.add_eos_token_id(eos)
    for name, data in tensors_of(folder).items():
        kind = experts if name.endswith("_exps.weight") else Kind.F32
        if name != without:
            writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
    finish(writer)
    return path


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """With the limit of its gate that its files do not tell."""
    save_tiny(family("GptOssConfig", num_hidden_layers=4, **GPT_OSS | {"swiglu_limit": 7.0}), tmp_path / "hf")
    return tmp_path / "hf"


def unlimited(folder: Path) -> Path:
    """The checkpoint with that limit."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"swiglu_limit": 7.0}))
    return folder


def test_a_plain_file(tiny: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", tiny)
    same_logits(load(path), tiny, tolerance=1e-4)
    route = implementation_of(resolve(str(path)))
    assert (route.family, route.path) == ("gpt-oss", OWN)


def test_experts_in_mxfp4(mxfp4: Path, tmp_path: Path) -> None:  # noqa: F811
    values, codes = unlimited(mxfp4.parent / "values"), unlimited(mxfp4)
    path = write(tmp_path / "a.gguf", values, experts=Kind.MXFP4)
    model = load(path)
    same_logits(model, codes, tolerance=1e-5)
    same_logits(model, values, tolerance=1e-4)
    source = resolve(str(path))
    assert "MXFP4" in implementation_of(source).formats
    found, wanted = model_needs(source), model_needs(resolve(str(codes)))
    assert (found.parameters, found.dense.stored_bytes, found.dense.coded_bytes, found.dense.active) == (
        wanted.parameters, wanted.dense.stored_bytes, wanted.dense.coded_bytes, wanted.dense.active,
    )  # fmt: skip
    if instruction_set() is None:
        return
    packed = load_model(source, device=CPU, dtype=torch.bfloat16, ops=CpuOps(1), quantization="auto")
    assert packed.info.revision.endswith("+Q5_0")
    assert correlation(packed, load(codes)) > 0.99  # type: ignore[arg-type]


def test_values_of_mxfp4_equal_the_format() -> None:
    """Of scales that float32 holds once they are halved."""
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (37, 17), dtype=np.uint8)
    raw[:, 0] = rng.integers(2, 255, 37)
    out = torch.empty(37, 32)
    dequantise(torch.from_numpy(raw.reshape(-1)), Kind.MXFP4, out)
    assert torch.equal(out, torch.from_numpy(gguf.dequantize(raw, Kind.MXFP4)))
    assert stored_bytes(Kind.MXFP4, 37 * 32) == raw.size


@pytest.mark.parametrize("eos", [1, 3])
def test_what_ends_an_output(eos: int, tiny: Path, tmp_path: Path) -> None:
    """Whatever the file names: a message's end is none of it."""
    facts = read_facts(resolve(str(write(tmp_path / "a.gguf", tiny, eos=eos))))
    assert sorted(facts.eos_token_ids) == [1, 4, 5]


def test_what_is_missing_is_named(tiny: Path, tmp_path: Path) -> None:
    for name in ("blk.1.attn_sinks.weight", "blk.2.ffn_up_exps.bias", "blk.0.post_attention_norm.weight"):
        with pytest.raises(ConfigError, match=f"lack the tensor {name}"):
            load_model(
                resolve(str(write(tmp_path / "a.gguf", tiny, without=name))),
                device=CPU, dtype=torch.float32, ops=ReferenceOps(),
            )  # fmt: skip
