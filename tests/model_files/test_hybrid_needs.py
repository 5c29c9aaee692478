"""What hybrid models need: K/V of attention layers alone, and a state for each sequence."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.model_files.memory_needs import config_needs, model_needs
from kvferry.model_files.source import read_json, resolve
from kvferry.protocol.errors import ConfigError
from tests.engine.hybrid_gguf import Converter
from tests.engine.test_models_gguf_hybrid import FILES
from tests.engine.tiny_hybrids import HYBRIDS
from tests.engine.tiny_models import save_tiny

STATES = {
    "lfm2": 2 * 64 * 2,
    "qwen3.5": 2 * ((2 * 24 + 80) * 3 + 4 * 12 * 20),
    "granite4": 2 * ((128 + 2 * 12) * 3 + 128 * 12),
    "falcon-h1": 3 * ((96 + 2 * 12) * 3 + 96 * 12),
    "jamba": 2 * (128 * 3 + 128 * 6),
    "minimax": 2 * 4 * 24 * 24,
    "nemotron-h": 2 * ((96 + 2 * 2 * 10) * 3 + 96 * 10),
}


@pytest.mark.parametrize(
    "name", ["lfm2", "lfm2-moe", "qwen3.5", "qwen3-next", "granite4-moe", "bamba", "jamba", "nemotron-3"]
)
def test_config_and_headers_tell_the_same(name: str, tmp_path: Path) -> None:
    save_tiny(HYBRIDS[name](), tmp_path)
    needs = model_needs(resolve(str(tmp_path)))
    assumed = config_needs(read_json(tmp_path / "config.json"), max_model_len=128)
    assert needs.parameters - assumed.parameters in range(-64 * 4 * 8, 64 * 4 * 8), "routers are not assumed"
    assert (needs.layers, needs.state_bytes, needs.kv_bytes("bfloat16")) == (
        assumed.layers,
        assumed.state_bytes,
        assumed.kv_bytes("bfloat16"),
    )


@pytest.mark.parametrize("name", STATES)
def test_only_attention_has_kv_and_mixers_have_a_state(name: str, tmp_path: Path) -> None:
    save_tiny(HYBRIDS[name](), tmp_path)
    needs = model_needs(resolve(str(tmp_path)))
    assert needs.state_bytes == 4 * STATES[name]
    assert (
        needs.layers
        == {"lfm2": 2, "qwen3.5": 1, "granite4": 1, "falcon-h1": 3, "jamba": 1, "minimax": 2, "nemotron-h": 1}[name]
    )
    assert needs.own


@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "granite4-moe", "falcon-h1", "jamba", "nemotron-3"])
def test_a_gguf_needs_what_its_checkpoint_does(name: str, tmp_path: Path) -> None:
    save_tiny(HYBRIDS[name](), tmp_path / "hf")
    architecture, fields = FILES[name]
    converter = Converter(tmp_path / "hf", architecture)
    found = model_needs(resolve(str(converter.write(tmp_path / "a.gguf", fields(converter.config)))))
    wanted = model_needs(resolve(str(tmp_path / "hf")))
    assert (found.layers, found.state_bytes, found.kv_bytes("bfloat16"), found.experts) == (
        wanted.layers,
        wanted.state_bytes,
        wanted.kv_bytes("bfloat16"),
        wanted.experts,
    )


def test_a_config_that_lacks_a_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no num_attention_heads"):
        config_needs({"model_type": "minimax", "vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2})
