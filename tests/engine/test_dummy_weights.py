"""Weights that are made: what they promise, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvferry.engine.models import load_model
from kvferry.engine.models.config import parse_config
from kvferry.engine.models.dummy_weights import DummyWeights
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.source import resolve
from kvferry.model_files.unsupported_models import resolve_runnable
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker.engine_factory import assemble
from tests.engine.tiny_models import chunked_logits, family, tokens_for

CPU = torch.device("cpu")


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(family("LlamaConfig").to_dict()))
    return tmp_path


def load(path: Path, **extra):
    source = resolve_runnable(str(path), "dummy")
    return load_model(source, device=CPU, dtype=torch.float32, ops=ReferenceOps(), load_format="dummy", **extra)


def test_a_config_alone_makes_a_model_that_is_the_same_each_time(config_only):
    tokens = tokens_for(20)
    logits = [chunked_logits(model, tokens, [20]) for model in (load(config_only), load(config_only))]
    assert torch.equal(*logits)
    assert logits[0].isfinite().all()
    assert len(set(logits[0].argmax(-1).tolist())) > 3


def test_numbers_depend_on_seed_and_name_and_have_the_spread_of_a_fresh_model():
    config = parse_config(family("LlamaConfig").to_dict())

    def numbers(seed: int, name: str, rows: int = 1100, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        out = torch.full((rows, 1000), torch.nan, dtype=dtype)
        DummyWeights(config, seed).read(name, out)
        return out

    whole = numbers(0, "a.weight")
    assert torch.equal(whole, numbers(0, "a.weight"))
    assert not torch.equal(whole, numbers(1, "a.weight"))
    assert not torch.equal(whole, numbers(0, "b.weight"))
    assert whole.std() == pytest.approx(0.02, rel=0.01)
    assert whole.mean().abs() < 1e-4
    assert len(whole.unique(dim=0)) == len(whole)
    torch.testing.assert_close(numbers(0, "a.weight", dtype=torch.bfloat16), whole.bfloat16(), atol=0, rtol=0)


def test_norms_scale_by_one_whatever_a_family_adds_to_them(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(family("GemmaConfig").to_dict()))
    parameters = load(tmp_path).parameters
    assert parameters.norm.tolist() == [1.0] * len(parameters.norm)


def test_biases_are_zero(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(family("Qwen2Config").to_dict()))
    bias = load(tmp_path).parameters.layers[0].attention.qkv.bias
    assert bias.tolist() == [0.0] * len(bias)


def test_a_node_is_assembled_of_a_config(config_only):
    parts = assemble(WorkerSettings(model=str(config_only), load_format="dummy", kv_blocks=8, dtype="float32"))
    again = resolve_runnable(str(config_only), "dummy")
    assert parts.info.revision.startswith(again.revision)
    assert len(again.revision) == 32


def test_without_files_only_dummy_weights_do(config_only):
    with pytest.raises(ConfigError, match="no weights"):
        resolve_runnable(str(config_only))


def test_what_cannot_have_them_is_refused(config_only):
    with pytest.raises(ConfigError, match=r"kvferry's own decoder") as refused:
        load(config_only, impl="transformers")
    assert refused.value.param == "load_format"
    with pytest.raises(ConfigError, match=r"a \.gguf file lacks"):
        resolve_runnable("smollm2", "dummy")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(
            resolve("smollm2", weights=False),
            device=CPU,
            dtype=torch.float32,
            ops=ReferenceOps(),
            load_format="dummy",
        )


def test_an_encoder_is_refused(tmp_path):
    config = {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": 30, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="decoders only"):
        assemble(WorkerSettings(model=str(tmp_path), load_format="dummy", device="cpu"))
