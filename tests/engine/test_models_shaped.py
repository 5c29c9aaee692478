"""Gemma 3n and Gemma 4: what their configs say and leave out, their memory, number formats, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.engine.models import load_model
from kvferry.engine.models.config import parse_config
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.ranks.shard import Shard
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.layer_shapes import layer_shapes
from kvferry.model_files.memory_needs import config_needs, model_needs
from kvferry.model_files.source import resolve
from kvferry.model_files.unsupported_models import resolve_runnable
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.layout import CachedLayer
from tests.engine.quantised_files import fp8, quantise
from tests.engine.test_models_quantised import FP8
from tests.engine.tiny_models import (
    GEMMA3N,
    GEMMA4,
    GEMMA4_LARGE,
    OURS,
    SHAPE,
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
NAMES = ("gemma3n", "gemma4", "gemma4-large", "gemma4-experts")
NEAR = {"gemma4-experts": 0.9}
"""Correlation of logits in 8 bits where it is lower: with other experts chosen, tokens differ altogether."""
SMALL, LARGE = CachedLayer(2, 16), CachedLayer(2, 32)


def load(path: Path, ops: Ops | None = None, dtype: torch.dtype = torch.float32, **extra: Any) -> Decoder:
    source = resolve(str(path))
    model = load_model(source, device=CPU, dtype=dtype, ops=ops or ReferenceOps(), impl="kvferry", **extra)
    assert isinstance(model, Decoder)
    return model


def edited(path: Path, **values: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({k: v for k, v in (config | values).items() if v != "omitted"}))


def test_layers_that_share_have_no_part_of_a_block(tmp_path: Path) -> None:
    save_tiny(OURS["gemma4"](), tmp_path)
    model = load(tmp_path)
    assert model.info.layers == (SMALL, LARGE, SMALL, LARGE)
    assert model.config.windows == (9, 0, 9, 0, 9, 0)
    shapes = model.config.shapes
    assert shapes is not None
    assert shapes.sources == (0, 1, 2, 3, 2, 3)
    assert [shapes.place(index) for index in range(6)] == [0, 1, 2, 3, 2, 3]
    assert shapes.widths == (96, 96, 96, 96, 192, 192)


def test_like_layers_that_share_make_a_pool_of_like_layers(tmp_path: Path) -> None:
    save_tiny(OURS["gemma3n"](), tmp_path)
    info = load(tmp_path).info
    assert (info.num_layers, info.layers) == (4, ())
    assert info.layout(torch.float32, 8).block_shape == (4, 2, 2, 8, 16)


def test_global_layers_as_published_configs_spell_them(tmp_path: Path) -> None:
    """transformers writes per_layer_config in place of two fields."""
    save_tiny(OURS["gemma4-large"](), tmp_path)
    wanted = chunked_logits(load(tmp_path), tokens_for(30), [30])
    edited(tmp_path, per_layer_config="omitted", global_head_dim=32, num_global_key_value_heads=1)
    assert torch.equal(chunked_logits(load(tmp_path), tokens_for(30), [30]), wanted)


def test_what_a_config_leaves_out() -> None:
    gemma3n = {"model_type": "gemma3n_text", "num_hidden_layers": 35, "num_key_value_heads": 2}
    shapes = layer_shapes(gemma3n | {"intermediate_size": 64})
    assert [i for i, slides in enumerate(shapes.sliding) if not slides] == [4, 9, 14, 19, 24, 29, 34]
    assert (len(shapes.cached), shapes.sources[20:25], shapes.sources[34]) == (20, (18, 18, 18, 18, 19), 19)
    assert (shapes.input_size, shapes.input_words, set(shapes.head_dims)) == (256, 262144, {256})
    gemma4 = gemma3n | {"model_type": "gemma4_text", "num_hidden_layers": 10, "intermediate_size": 64}
    shapes = layer_shapes(gemma4)
    assert [i for i, slides in enumerate(shapes.sliding) if not slides] == [5, 9], "the last has no window"
    assert shapes.head_dims == tuple(512 if i in (5, 9) else 256 for i in range(10))
    assert set(shapes.kv_heads) == {2}
    alike = gemma4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    assert layer_shapes(alike).kv_heads == tuple(1 if i in (5, 9) else 2 for i in range(10))
    assert layer_shapes(alike).own_values == layer_shapes(alike).sliding


def test_rotations_that_a_config_leaves_out(tmp_path: Path) -> None:
    for name in ("gemma3n", "gemma4"):
        save_tiny(OURS[name](), tmp_path / name)
        wanted = load(tmp_path / name).config
        edited(tmp_path / name, rope_parameters="omitted")
        assert load(tmp_path / name).config == wanted


def test_rotations_of_gemma_3n_as_its_first_checkpoints_spell_them() -> None:
    config = OURS["gemma3n"]().to_dict()
    wanted = parse_config(config)
    old = {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "rope_scaling": None, "query_pre_attn_scalar": 256}
    assert parse_config({name: value for name, value in config.items() if name != "rope_parameters"} | old) == wanted
    assert (wanted.rope.theta, wanted.local_rope and wanted.local_rope.theta) == (1000000.0, 10000.0)
    assert wanted.factors.attention == 1.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types must name 6 of"),
        ({"layer_types": ["full_attention"] * 5 + ["chunked_attention"]}, "layer_types must name 6 of"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5"),
        ({"num_kv_shared_layers": "2"}, "num_kv_shared_layers"),
        ({"per_layer_config": {"9": {"head_dim": 8}}}, "per_layer_config has no layer '9'"),
        ({"per_layer_config": {"5": {"head_dim": 8}}}, "layer 5 shares K/V of another shape, layer 3's"),
        (
            {"per_layer_config": {"1": {"head_dim": 8}, "3": {"head_dim": 32}, "5": {"head_dim": 32}}},
            r"head dims \[8, 32\]",
        ),
        ({"sliding_window": 0}, "sliding_window must be a whole number"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"attn_logit_softcapping": 5.0}, "attn_logit_softcapping"),
        ({"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3}, "top_k_experts is 3, of 2 experts"),
        ({"num_key_value_heads": "omitted"}, "config.json lacks num_key_value_heads"),
    ],
)
def test_a_gemma_4_that_makes_no_sense_is_named(change: dict[str, object], words: str) -> None:
    config = OURS["gemma4"]().to_dict() | change
    with pytest.raises(ConfigError, match=words):
        parse_config({name: value for name, value in config.items() if value != "omitted"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"intermediate_size": [96, 96]}, "intermediate_size has 2 values for 6 layers"),
        ({"activation_sparsity_pattern": [0.5] * 5}, "must be 6 numbers from 0 to below 1"),
        ({"activation_sparsity_pattern": [1.0] * 6}, "must be 6 numbers from 0 to below 1"),
        ({"altup_active_idx": 4}, "altup_active_idx is 4, of 4 streams"),
    ],
)
def test_a_gemma_3n_that_makes_no_sense_is_named(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(OURS["gemma3n"]().to_dict() | change)


def test_text_beside_images_stays_causal(tmp_path: Path) -> None:
    save_tiny(OURS["gemma4"](), tmp_path)
    edited(tmp_path, use_bidirectional_attention="vision")
    expect_equal_logits(load(tmp_path), lambda tokens: oracle_logits(tmp_path, tokens))


def test_more_than_ten_layers_are_sparse_unless_the_config_says(tmp_path: Path) -> None:
    more = {"num_hidden_layers": 12, "layer_types": ["sliding_attention", "full_attention"] * 6}
    save_tiny(
        family("Gemma3nTextConfig", **GEMMA3N | more | {"activation_sparsity_pattern": None, "intermediate_size": 64}),
        tmp_path,
    )
    edited(tmp_path, activation_sparsity_pattern="omitted")
    expect_equal_logits(load(tmp_path), lambda tokens: oracle_logits(tmp_path, tokens), 5e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_node_needs_what_the_files_hold(name: str, tmp_path: Path) -> None:
    save_tiny(OURS[name](), tmp_path)
    needs, info = model_needs(resolve(str(tmp_path))), load(tmp_path).info
    stored = load_file(tmp_path / "model.safetensors")
    matrices = {name: tensor.numel() for name, tensor in stored.items() if tensor.dim() > 1}
    assert needs.parameters == sum(matrices.values())
    assert needs.layout("float32", 8) == info.layout(torch.float32, 8)
    assert needs.own
    table = matrices.get("model.embed_tokens_per_layer.weight", 0)
    experts = sum(count for name, count in matrices.items() if ".experts." in name)
    assert needs.dense.active == needs.dense.weights - table - experts // 2, "three of six experts, no row of a table"


def test_a_config_alone_tells_nearly_as_much() -> None:
    config = OURS["gemma4-large"]().to_dict()
    needs = config_needs(config)
    heads = 64 * (3 * (2 * 4 * 16 + 2 * 2 * 16) + 3 * (2 * 4 * 32 + 32))
    assert needs.dense.weights == heads // 6 * 6 + 6 * 3 * 96 * 64
    assert needs.kv_bytes("int8") == 3 * 2 * 2 * 20 + 3 * 2 * 36


@needs_extension
@pytest.mark.parametrize("name", NAMES)
def test_weights_in_int8_are_near(name: str, tmp_path: Path) -> None:
    save_tiny(OURS[name](), tmp_path)
    model = load(tmp_path, CpuOps(1), torch.bfloat16, quantization="int8")
    assert model.info.revision.endswith("+INT8")
    plain, tokens = load(tmp_path, CpuOps(1), torch.bfloat16), tokens_for(40)
    found = [chunked_logits(each, tokens, [23, 17]).flatten() for each in (model, plain)]
    assert torch.corrcoef(torch.stack(found))[0, 1] > NEAR.get(name, 0.97)


@needs_extension
@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_a_checkpoint_in_fp8_runs_as_stored(name: str, tmp_path: Path) -> None:
    """The small matrices of AltUp are read from their codes, too."""
    save_tiny(OURS[name](), tmp_path / "plain")
    config = FP8 | {"weight_block_size": [32, 64]}
    quantise(tmp_path / "plain", tmp_path / "fp8", tmp_path / "values", fp8("block", "weight_scale_inv"), config)
    stored = load(tmp_path / "fp8", CpuOps(1), torch.bfloat16, quantization="auto")
    assert "+" in stored.info.revision
    exact, tokens = load(tmp_path / "values"), tokens_for(40)
    found = [chunked_logits(each, tokens, [23, 17]).flatten() for each in (stored, exact)]
    assert torch.corrcoef(torch.stack(found))[0, 1] > 0.99


@needs_extension
@pytest.mark.parametrize("cache", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", NAMES)
def test_a_cache_in_8_bits_is_near(name: str, cache: torch.dtype, tmp_path: Path) -> None:
    save_tiny(OURS[name](), tmp_path)
    model, tokens = load(tmp_path, CpuOps(1)), tokens_for(40)
    found = [chunked_logits(model, tokens, [23, 1, 16], dtype).flatten() for dtype in (None, cache)]
    assert not torch.equal(*found)
    assert torch.corrcoef(torch.stack(found))[0, 1] > NEAR.get(name, 0.97)


def test_the_text_of_a_multimodal_gemma_4(tmp_path: Path) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"head_dim": 16, "num_key_value_heads": 2, "position_embedding_size": 64}
    text = SHAPE | GEMMA4 | {"pad_token_id": 0, "tie_word_embeddings": True}
    torch.manual_seed(7)
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None)
    whole = transformers.Gemma4ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path)
    tokens = tokens_for(40) % 90
    with torch.inference_mode():
        wanted = whole(input_ids=tokens[None]).logits[0]
    torch.testing.assert_close(chunked_logits(load(tmp_path), tokens, [17, 23]), wanted, rtol=2e-4, atol=2e-4)
    stored = load_file(tmp_path / "model.safetensors")
    text_alone = [t.numel() for name, t in stored.items() if "language_model" in name and t.dim() > 1]
    assert model_needs(resolve(str(tmp_path))).parameters == sum(text_alone)


def test_the_text_of_a_multimodal_gemma_3n(tmp_path: Path) -> None:
    """Its tensors and its config in the places that they have beside eyes and ears."""
    save_tiny(OURS["gemma3n"](), tmp_path)
    tokens = tokens_for(40)
    wanted = chunked_logits(load(tmp_path), tokens, [40])
    stored = load_file(tmp_path / "model.safetensors")
    save_file(
        {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in stored.items()},
        tmp_path / "model.safetensors",
    )
    text = json.loads((tmp_path / "config.json").read_text())
    nested = {"model_type": "gemma3n", "text_config": text, "vision_config": {}, "audio_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert torch.equal(chunked_logits(load(tmp_path), tokens, [40]), wanted)


def test_dummy_weights_make_a_model(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / "config.json").write_text(json.dumps(OURS[name]().to_dict()))
        source = resolve_runnable(str(tmp_path), "dummy")
        model = load_model(source, device=CPU, dtype=torch.float32, ops=ReferenceOps(), load_format="dummy")
        assert chunked_logits(model, tokens_for(20), [20]).isfinite().all()


def test_several_ranks_are_refused() -> None:
    config = parse_config(family("Gemma4TextConfig", **GEMMA4_LARGE).to_dict())
    with pytest.raises(ConfigError, match="tensor_parallel_size: gemma4_text runs on one rank"):
        Shard(0, 2).of(config)
