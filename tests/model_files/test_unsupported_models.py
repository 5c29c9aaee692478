"""Models that their config alone refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest
from gguf import GGUFWriter

from kvferry.model_files.source import resolve
from kvferry.model_files.unsupported_models import require_runnable, resolve_runnable
from kvferry.protocol.errors import ConfigError
from tests.gguf_files import finish

TEXT = {"model_type": "x", "vocab_size": 100, "max_position_embeddings": 64}


def directory(path, config):
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(b"weights")
    return resolve(str(path))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llava", "text_config": TEXT, "vision_config": {}}, "multimodal"),
        (TEXT | {"model_type": "minicpm3", "kv_lora_rank": 512}, "MLA"),
        ({"model_type": "kimi_k25", "text_config": TEXT | {"kv_lora_rank": 512}}, "MLA"),
        (TEXT | {"model_type": "t5", "is_encoder_decoder": True}, "encoder"),
    ],
)
def test_what_cannot_run_is_named_with_its_reason(tmp_path, config, words):
    with pytest.raises(ConfigError, match=words) as caught:
        require_runnable(directory(tmp_path, config))
    assert f"{tmp_path.name} ({config['model_type']}) cannot be served: " in caught.value.message
    assert caught.value.param == "model"


def test_what_may_run_passes(tmp_path):
    require_runnable(directory(tmp_path, TEXT | {"kv_lora_rank": None, "is_encoder_decoder": False}))
    require_runnable(directory(tmp_path, TEXT | {"model_type": "deepseek_v2", "kv_lora_rank": 512}))
    require_runnable(resolve("smollm2"))


def latent_gguf(path, architecture):
    writer = GGUFWriter(str(path), architecture)
    writer.add_uint32(f"{architecture}.attention.kv_lora_rank", 512)
    writer.add_tensor("token_embd.weight", np.zeros((3, 4), dtype=np.float32))
    finish(writer)
    return resolve(str(path))


def test_a_gguf_is_refused_by_its_header(tmp_path):
    with pytest.raises(ConfigError, match=r"deep \(minicpm3\) cannot be served"):
        require_runnable(latent_gguf(tmp_path / "deep.gguf", "minicpm3"))
    require_runnable(latent_gguf(tmp_path / "deep.gguf", "deepseek2"))


def test_of_a_hub_s_model_that_cannot_run_no_weights_are_downloaded(tmp_path, monkeypatch):
    directory(tmp_path, TEXT | {"kv_lora_rank": 512})
    asked: list[str] = []

    def download(repo, patterns):
        asked.extend(patterns)
        return tmp_path

    monkeypatch.setattr("kvferry.model_files.source.download", download)
    with pytest.raises(ConfigError, match=r"org/deep .* cannot be served"):
        resolve_runnable("org/deep")
    assert "*.json" in asked
    assert "*.safetensors" not in asked
    directory(tmp_path, TEXT)
    assert resolve_runnable("org/fine").revision
    assert "*.safetensors" in asked
