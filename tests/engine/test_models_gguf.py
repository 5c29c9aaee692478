"""GGUF files: every quantisation type, the order of q and k rows, rope settings, and the demo model itself."""

import gguf
import numpy as np
import pytest
import torch

from kvferry.engine.models import load_model
from kvferry.engine.models.dequantise import dequantise, stored_bytes
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError
from tests.engine.tiny_models import (
    BLOCK,
    LLAMA3,
    OURS,
    Cache,
    chunked_logits,
    family,
    save_tiny,
    tokens_for,
    transformers,
)
from tests.gguf_files import finish, gguf_name
from tests.transformers_demo import load_demo

CPU = torch.device("cpu")
Kind = gguf.GGMLQuantizationType
HALVES = {
    Kind.Q4_0: [0],
    Kind.Q4_1: [0, 2],
    Kind.Q5_0: [0],
    Kind.Q5_1: [0, 2],
    Kind.Q8_0: [0],
    Kind.Q4_K: [0, 2],
    Kind.Q5_K: [0, 2],
    Kind.Q6_K: [208],
    Kind.Q2_K: [80, 82],
    Kind.Q3_K: [108],
    Kind.IQ4_NL: [0],
    Kind.IQ4_XS: [0],
}

pytestmark = pytest.mark.usefixtures("one_thread")


def load(path, **extra):
    return load_model(resolve(str(path)), device=CPU, dtype=torch.float32, ops=ReferenceOps(), **extra)


def experts_of(config) -> dict[str, int | bool]:
    """The fields of a file whose layers hold experts."""
    fields = {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok}
    inner = getattr(config, "moe_intermediate_size", None)
    return fields | ({"expert_feed_forward_length": inner} if inner else {})


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order in which llama.cpp's converter stores q and k of the llama architecture."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def gguf_tensors(model) -> dict[str, np.ndarray]:
    """By their names in a GGUF; gate and up of experts lie apart there."""
    found: dict[str, np.ndarray] = {}
    for name, value in model.state_dict().items():
        prefix, is_expert, part = name.partition(".mlp.experts.")
        if not is_expert:
            found[gguf_name(name)] = value.numpy()
            continue
        parts = {"gate": value.chunk(2, 1)[0], "up": value.chunk(2, 1)[1]} if "gate_up" in part else {"down": value}
        for which, each in parts.items():
            found[f"blk.{prefix.rsplit('.', 1)[1]}.ffn_{which}_exps.weight"] = each.contiguous().numpy()
    return found


def write_gguf(path, directory, architecture, *, kind=Kind.F32, extra=None, fields=None, part_tensors=0):
    """A GGUF of a model directory: matrices in `kind` where their rows divide into its blocks, vectors in F32.
    part_tensors: how many one file holds; 0: all."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture, split_max_tensors=part_tensors)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "layer_norm_eps"):
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_logit_scale(config.logit_scale)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    for key, value in (fields or {}).items():
        add = {
            str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool
        }[type(value)]  # fmt: skip
        add(f"{architecture}.{key}", value)
    tied = config.tie_word_embeddings
    for name, data in gguf_tensors(model).items():
        if tied and name == "output.weight":
            continue
        if architecture in ("llama", "smollm3") and (".attn_q." in name or ".attn_k." in name):
            data = interleaved(data, config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads)
        stored = kind if data.ndim > 1 and data.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 else Kind.F32
        writer.add_tensor(name, gguf.quantize(data, stored), raw_dtype=stored)
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    finish(writer)
    return path


def same_logits(model, directory, tolerance=2e-4):
    tokens = tokens_for(40)
    wanted = chunked_logits(load(directory), tokens, [40])
    torch.testing.assert_close(chunked_logits(model, tokens, [23, 17]), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantised_values_equal_the_format(kind, dtype):
    rng = np.random.default_rng(0)
    size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 37, size * 20
    raw = rng.integers(0, 256, (rows * columns // size, block_bytes), dtype=np.uint8)
    for offset in HALVES[kind]:
        scales = rng.standard_normal((len(raw), 1)).astype(np.float16)
        raw[:, offset : offset + 2] = scales.view(np.uint8)
    wanted = torch.from_numpy(gguf.dequantize(raw, kind)).view(rows, columns).to(dtype)
    out = torch.empty(rows, columns, dtype=dtype)
    assert stored_bytes(kind, rows * columns) == raw.size
    dequantise(torch.from_numpy(raw.reshape(-1)), kind, out)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16])
def test_plain_types(kind):
    values = torch.randn(6, 8)
    stored = np.ascontiguousarray(gguf.quantize(values.numpy(), kind)).view(np.uint8).reshape(-1)
    out = torch.empty(6, 8)
    dequantise(torch.from_numpy(stored), kind, out)
    torch.testing.assert_close(out, values, rtol=1e-2, atol=1e-6 if kind == Kind.F32 else 1e-2)
    assert stored_bytes(kind, 48) == stored.size


def test_a_split_file_is_read_by_any_of_its_parts(tmp_path):
    save_tiny(family("LlamaConfig"), tmp_path / "hf")
    whole = load(write_gguf(tmp_path / "whole.gguf", tmp_path / "hf", "llama"))
    (tmp_path / "parts").mkdir()
    write_gguf(tmp_path / "parts" / "m.gguf", tmp_path / "hf", "llama", part_tensors=12)
    first, second, third = sorted((tmp_path / "parts").glob("*.gguf"))
    assert first.name == "m-00001-of-00003.gguf"
    sources = [resolve(str(each)) for each in (first, third, tmp_path / "parts")]
    assert [each.name for each in sources] == ["m", "m", "parts"]
    assert len({each.revision for each in sources}) == 1
    assert sources[0].revision != resolve(str(tmp_path / "whole.gguf")).revision
    tokens = tokens_for(40)
    assert torch.equal(chunked_logits(load(third), tokens, [40]), chunked_logits(whole, tokens, [40]))
    second.write_bytes(second.read_bytes() + b"changed")
    assert resolve(str(first)).revision != sources[0].revision
    second.unlink()
    with pytest.raises(ConfigError, match=r"m-00002-of-00003\.gguf: No such file"):
        resolve(str(first))


def test_unsupported_type_is_named():
    with pytest.raises(ConfigError, match="IQ2_XS is not supported"):
        stored_bytes(Kind.IQ2_XS, 256)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", lambda: family("LlamaConfig")),
        ("llama", lambda: family("LlamaConfig", tie_word_embeddings=True, head_dim=32, attention_bias=True)),
        ("qwen2", lambda: family("Qwen2Config")),
        ("qwen3", lambda: family("Qwen3Config", head_dim=32, tie_word_embeddings=True)),
        ("smollm3", lambda: family("SmolLM3Config", num_hidden_layers=4, pad_token_id=0, tie_word_embeddings=True)),
    ],
)
def test_architectures(architecture, config, tmp_path):
    save_tiny(config(), tmp_path / "hf")
    model = load(write_gguf(tmp_path / "tiny.gguf", tmp_path / "hf", architecture))
    assert (model.info.name, model.info.max_model_len) == ("tiny", 128)
    same_logits(model, tmp_path / "hf")


@pytest.mark.parametrize(
    ("architecture", "name"), [("llama", "mixtral"), ("qwen3moe", "qwen3-moe"), ("olmoe", "olmoe")]
)
def test_experts(architecture, name, tmp_path):
    config = OURS[name]()
    save_tiny(config, tmp_path / "hf")
    path = write_gguf(tmp_path / "a.gguf", tmp_path / "hf", architecture, fields=experts_of(config))
    same_logits(load(path), tmp_path / "hf")


@pytest.mark.parametrize(
    ("architecture", "name", "fields"),
    [("command-r", "cohere-plus", {}), ("cohere2", "cohere2", {"attention.sliding_window": 9})],
)
def test_neighbours_that_rotate_together(architecture, name, fields, tmp_path):
    """As plain tensors and, where the kernels run them, in codes as stored."""
    save_tiny(OURS[name](), tmp_path / "hf")
    same_logits(load(write_gguf(tmp_path / "a.gguf", tmp_path / "hf", architecture, fields=fields)), tmp_path / "hf")
    if instruction_set() is None:
        return
    path = write_gguf(tmp_path / "q.gguf", tmp_path / "hf", architecture, fields=fields, kind=Kind.Q8_0)
    model = load_model(resolve(str(path)), device=CPU, dtype=torch.bfloat16, ops=CpuOps(1), quantization="auto")
    assert model.info.revision.endswith("+Q8_0")
    tokens = tokens_for(40)
    found = [chunked_logits(each, tokens, [23, 17]).flatten() for each in (model, load(tmp_path / "hf"))]
    assert torch.corrcoef(torch.stack(found))[0, 1] > 0.999


def test_a_file_with_too_few_experts_is_named(tmp_path):
    save_tiny(OURS["mixtral"](), tmp_path / "hf")
    fields = {"expert_count": 5, "expert_used_count": 2}
    path = write_gguf(tmp_path / "a.gguf", tmp_path / "hf", "llama", fields=fields)
    with pytest.raises(ConfigError, match=r"ffn_gate_inp.weight has shape \(4, 64\), the config says \(5, 64\)"):
        load(path)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_quantised_file_equals_its_dequantised_weights(kind, tmp_path):
    save_tiny(family("LlamaConfig"), tmp_path / "hf")
    quantised = load(write_gguf(tmp_path / "q.gguf", tmp_path / "hf", "llama", kind=kind))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2 and parameter.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
                parameter.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(parameter.numpy(), kind), kind)))
    model.save_pretrained(tmp_path / "rounded")
    same_logits(quantised, tmp_path / "rounded")


@pytest.mark.parametrize(
    "kind", [kind for kind in HALVES if gguf.GGML_QUANT_SIZES[kind][0] == 256], ids=lambda kind: kind.name
)
def test_k_quants_in_a_file(kind, tmp_path):
    """The package cannot quantise these, so the blocks are made of random bytes with small scales."""
    save_tiny(family("LlamaConfig", intermediate_size=256), tmp_path / "hf")
    rng = np.random.default_rng(0)
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (64, block_bytes), dtype=np.uint8)
    for offset in HALVES[kind]:
        raw[:, offset : offset + 2] = np.full((64, 1), 1e-4, dtype=np.float16).view(np.uint8)

    original = gguf.quantize

    def quantize(data, wanted):
        return raw if wanted == kind else original(data, wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "quantize", quantize)
        path = write_gguf(tmp_path / "k.gguf", tmp_path / "hf", "llama", kind=kind)
    model = load(path)
    wanted = torch.from_numpy(gguf.dequantize(raw, kind))
    for layer in model.parameters.layers:
        assert torch.equal(layer.mlp.down.weight, wanted)


def test_llama3_rope_divisors(tmp_path):
    """llama.cpp stores llama3's scaling as one divisor per frequency."""
    save_tiny(family("LlamaConfig", rope_parameters=LLAMA3), tmp_path / "hf")
    plain = 1.0 / 500.0 ** (np.arange(0, 16, 2) / 16)
    turns = 32 * plain / (2 * np.pi)
    keep = np.clip((turns - 1.0) / 3.0, 0, 1)
    divisors = (1 / ((1 - keep) / 4.0 + keep)).astype(np.float32)
    assert 1.0 < divisors.max() <= 4.0
    path = write_gguf(tmp_path / "a.gguf", tmp_path / "hf", "llama", extra={"rope_freqs.weight": divisors})
    same_logits(load(path), tmp_path / "hf")


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling(kind, tmp_path):
    rope = {"rope_type": kind, "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
    save_tiny(family("Qwen2Config", rope_parameters=rope), tmp_path / "hf")
    fields = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
    same_logits(load(write_gguf(tmp_path / "a.gguf", tmp_path / "hf", "qwen2", fields=fields)), tmp_path / "hf")


def test_yarn_settings_of_llama_cpp(tmp_path):
    """attn_factor multiplies the default 0.1 ln(factor) + 1; the betas bound the ramp."""
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
    rope |= {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.5 * (0.1 * np.log(4.0) + 1)}
    save_tiny(family("Qwen2Config", rope_parameters=rope), tmp_path / "hf")
    fields = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
    fields |= {"rope.scaling.attn_factor": 1.5, "rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0}
    same_logits(load(write_gguf(tmp_path / "a.gguf", tmp_path / "hf", "qwen2", fields=fields)), tmp_path / "hf")


def test_what_is_not_supported_is_named(tmp_path):
    save_tiny(family("LlamaConfig"), tmp_path / "hf")
    with pytest.raises(ConfigError, match="'mamba'"):
        load(write_gguf(tmp_path / "mamba.gguf", tmp_path / "hf", "mamba"), impl="kvferry")
    path = write_gguf(tmp_path / "cut.gguf", tmp_path / "hf", "llama")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match="ends inside"):
        load(path)


@pytest.mark.slow
@torch.inference_mode()
def test_demo_model_equals_transformers_load_of_it():
    torch.set_num_threads(2)
    source = resolve("smollm2")
    tokens = torch.tensor([1, 4093, 198, 1780, 314, 253, 1165, 42, 2, 198, 1, 520, 9531, 198, 504, 3575, 282, 4649])
    model = load_model(source, device=CPU, dtype=torch.float32, ops=ReferenceOps())
    cache = Cache(model, blocks=8)
    logits = torch.cat([cache.step({"a": chunk})[0] for chunk in tokens.split([BLOCK, 1, len(tokens) - BLOCK - 1])])
    oracle = load_demo(attn_implementation="eager")
    wanted = oracle(input_ids=tokens[None]).logits[0]
    torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-3)
    assert torch.equal(logits.argmax(-1), wanted.argmax(-1))
