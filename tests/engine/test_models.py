"""Our decoder against transformers' own logits, on tiny random models of each family."""

import json

import pytest
import torch

from kvferry.engine.models import load_model
from kvferry.engine.models.base import ForwardAbandoned
from kvferry.engine.models.loader import auto_dtype
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.source import read_facts, resolve
from kvferry.protocol.errors import ConfigError
from tests.engine.tiny_models import (
    LONGROPE,
    OURS,
    SHAPE,
    Cache,
    chunked_logits,
    expect_equal_logits,
    family,
    oracle_logits,
    save_tiny,
    tokens_for,
)

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


def load(path, impl="kvferry", dtype=torch.float32, **extra):
    return load_model(resolve(str(path)), device=CPU, dtype=dtype, ops=ReferenceOps(), impl=impl, **extra)


@pytest.fixture
def llama(tmp_path):
    save_tiny(family("LlamaConfig"), tmp_path)
    return tmp_path


def edit_config(path, **values):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | values))


@pytest.mark.parametrize("name", OURS)
def test_logits_equal_transformers(name, tmp_path):
    save_tiny(OURS[name](), tmp_path)
    model = load(tmp_path)
    expect_equal_logits(model, lambda tokens: oracle_logits(tmp_path, tokens))


@pytest.mark.parametrize("name", ["llama3", "qwen2-yarn"])
def test_old_spelling_of_rope_settings(name, tmp_path):
    save_tiny(OURS[name](), tmp_path)
    tokens = tokens_for(40)
    wanted = chunked_logits(load(tmp_path), tokens, [40])
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"rope_theta": theta, "rope_scaling": rope | {"type": kind}})
    )
    torch.testing.assert_close(chunked_logits(load(tmp_path), tokens, [40]), wanted)


def test_windows_of_cohere_2_as_the_hub_spells_them(tmp_path):
    """A pattern in place of a list of layers; layers without a window do not rotate."""
    save_tiny(OURS["cohere2"](), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["layer_types"]
    for pattern in (4, 2):
        (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window_pattern": pattern}))
        model = load(tmp_path)
        assert model.config.windows == ((9, 9, 9, 0) if pattern == 4 else (9, 0, 9, 0))
        expect_equal_logits(model, lambda tokens: oracle_logits(tmp_path, tokens))


def test_longrope_within_the_original_length_has_the_short_factors(tmp_path):
    config = family("Phi3Config", pad_token_id=0, rope_parameters=LONGROPE, original_max_position_embeddings=64)
    save_tiny(config, tmp_path)
    short, long = load(tmp_path, max_model_len=64), load(tmp_path)
    expect_equal_logits(short, lambda tokens: oracle_logits(tmp_path, tokens))
    tokens = tokens_for(100)
    torch.testing.assert_close(
        chunked_logits(long, tokens, [30, 70]), oracle_logits(tmp_path, tokens), rtol=2e-4, atol=2e-4
    )
    assert short.info.revision != long.info.revision, "their blocks differ"


def test_longrope_in_the_first_checkpoints_spelling(tmp_path):
    save_tiny(OURS["phi3-long"](), tmp_path)
    tokens = tokens_for(40)
    wanted = chunked_logits(load(tmp_path), tokens, [40])
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    named = {"rope_theta": rope["rope_theta"], "original_max_position_embeddings": 16}
    factors = {name: rope[name] for name in ("short_factor", "long_factor")}
    (tmp_path / "config.json").write_text(json.dumps(config | named | {"rope_scaling": factors | {"type": "su"}}))
    torch.testing.assert_close(chunked_logits(load(tmp_path), tokens, [40]), wanted)


def test_longrope_with_too_few_factors_is_refused(tmp_path):
    save_tiny(OURS["phi3-long"](), tmp_path)
    edit_config(tmp_path, rope_parameters=LONGROPE | {"long_factor": [1.0]})
    with pytest.raises(ConfigError, match="1 factors for 8 frequencies"):
        load(tmp_path)


def test_facts_of_the_model(llama):
    info = load(llama).info
    assert (info.num_layers, info.num_kv_heads, info.head_dim, info.vocab_size) == (3, 2, 16, SHAPE["vocab_size"])
    assert info.max_model_len == read_facts(resolve(str(llama))).max_model_len == 128
    assert (info.name, info.revision) == (llama.name, resolve(str(llama)).revision)


def test_sharded_safetensors(llama, tmp_path):
    from tests.engine.tiny_models import transformers

    sharded = tmp_path / "sharded"
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    model.save_pretrained(sharded, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    tokens = tokens_for(20)
    assert torch.equal(chunked_logits(load(sharded), tokens, [20]), chunked_logits(load(llama), tokens, [20]))


def test_torch_checkpoint(llama):
    from safetensors.torch import load_file

    tokens = tokens_for(20)
    wanted = chunked_logits(load(llama), tokens, [20])
    torch.save(load_file(llama / "model.safetensors"), llama / "pytorch_model.bin")
    (llama / "model.safetensors").unlink()
    assert torch.equal(chunked_logits(load(llama), tokens, [20]), wanted)


def test_bfloat16_is_near(llama):
    model = load(llama, dtype=torch.bfloat16)
    tokens = tokens_for(30)
    logits = chunked_logits(model, tokens, [30])
    wanted = oracle_logits(llama, tokens)
    assert (model.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
    assert torch.corrcoef(torch.stack((logits.flatten(), wanted.flatten())))[0, 1] > 0.999


@pytest.mark.parametrize("impl", ["kvferry", "transformers"])
@pytest.mark.parametrize(("cache", "near"), [(torch.int8, 0.999), (torch.float8_e4m3fn, 0.998)])
def test_a_cache_in_8_bits_is_near(llama, impl, cache, near):
    model = load(llama, impl)
    tokens = tokens_for(30)
    logits = chunked_logits(model, tokens, [20, 1, 9], cache)
    wanted = oracle_logits(llama, tokens)
    assert not torch.equal(logits, chunked_logits(model, tokens, [20, 1, 9]))
    assert torch.corrcoef(torch.stack((logits.flatten(), wanted.flatten())))[0, 1] > near


def test_auto_dtype(monkeypatch):
    for capability, dtype in [("avx512_bf16", torch.bfloat16), ("amx_bf16", torch.bfloat16), ("avx2", torch.float32)]:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda name=capability: {name: True})
        assert auto_dtype(CPU, compiled=False) == dtype
        assert auto_dtype(CPU, compiled=True) == torch.bfloat16
    assert auto_dtype(torch.device("cuda"), compiled=False) == torch.bfloat16


def test_progress_rises_to_one(llama):
    seen = []
    load(llama, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[0] > 0
    assert seen[-1] == 1.0
    assert len(seen) >= 4


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "gpt_neo"}, "architecture 'gpt_neo'"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope scaling 'proportional'"),
        ({"rope_parameters": {"full_attention": {}}}, "differ between layers"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantisation 'mxfp4'"),
        ({"num_hidden_layers": 4}, "lack the tensor model.layers.3"),
        ({"intermediate_size": 95}, r"gate_proj.weight has shape \(96, 64\)"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"num_attention_heads": "four"}, "num_attention_heads must be a whole number of at least 1, got 'four'"),
        ({"hidden_size": 0}, "hidden_size must be a whole number of at least 1, got 0"),
    ],
)
def test_what_is_not_supported_is_named(llama, values, words):
    edit_config(llama, **values)
    with pytest.raises(ConfigError, match=words):
        load(llama)


def test_unknown_implementation(llama):
    with pytest.raises(ConfigError, match="model_impl must be one of"):
        load(llama, impl="other")


def test_broken_safetensors(llama):
    (llama / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ConfigError, match="download it again"):
        load(llama)


@pytest.mark.parametrize("impl", ["kvferry", "transformers"])
def test_a_pass_that_is_not_wanted_ends_before_the_next_layer(llama, impl):
    """And what it wrote does no harm: the same tokens are computed over it."""
    model, tokens = load(llama, impl=impl), tokens_for(20)
    cache, answers = Cache(model), [True, False]
    with pytest.raises(ForwardAbandoned):
        cache.step({"a": tokens}, lambda: answers.pop(0))
    assert answers == []
    cache.computed.clear()
    torch.testing.assert_close(cache.step({"a": tokens})[0], oracle_logits(llama, tokens), rtol=2e-4, atol=2e-4)
