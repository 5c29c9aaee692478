"""Whisper's sizes and tokens from its files, and clear words about what is wrong in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvferry.model_files.source import resolve
from kvferry.model_files.speech_config import SpeechConfig, read_speech_config, transcribes
from kvferry.protocol.errors import ConfigError
from tests.engine.speech.tiny_whisper import CONTEXT, POSITIONS, edit, make_tiny_whisper


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_whisper(tmp_path_factory.mktemp("whisper") / "tiny")


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "tiny"))


def read(model: Path) -> SpeechConfig:
    return read_speech_config(resolve(str(model), weights=False))


def test_sizes_and_tokens(model: Path) -> None:
    found = read(model)
    assert transcribes(str(model))
    assert (found.positions, found.frames, found.context) == (POSITIONS, 2 * POSITIONS, CONTEXT)
    assert {code for code, _ in found.tokens.languages} == {"en", "de"}
    assert found.tokens.timestamps == found.tokens.no_timestamps + 1
    assert found.alignment_heads == ((0, 1), (1, 2))


def test_what_a_checkpoint_does_not_say(model: Path) -> None:
    """Languages follow from the tokenizer, and alignment heads are those of the upper half of the layers."""
    edit(model / "generation_config.json", lang_to_id=None, alignment_heads=None, max_initial_timestamp_index=None)
    found = read(model)
    assert [code for code, _ in found.tokens.languages] == ["en", "de"]
    assert found.alignment_heads == ((1, 0), (1, 1), (1, 2), (1, 3))
    assert found.max_initial_timestamp == 50
    edit(model / "generation_config.json", is_multilingual=False)
    assert read(model).tokens.languages == ()


@pytest.mark.parametrize(
    ("file", "fields", "told"),
    [
        ("config.json", {"activation_function": "relu"}, "activation_function must be gelu"),
        ("config.json", {"d_model": 65}, "not a multiple of the number of heads"),
        ("config.json", {"num_mel_bins": -1}, "num_mel_bins must be a whole number"),
        ("config.json", {"vocab_size": 100}, "vocab_size 100 lacks tokens"),
        ("config.json", {"decoder_layers": 10**9}, "layers is not supported"),
        ("generation_config.json", {"alignment_heads": [[7, 0]]}, "a head that the model lacks"),
        ("generation_config.json", {"suppress_tokens": ["x"]}, "is invalid"),
        ("generation_config.json", {"alignment_heads": 3}, "is invalid"),
    ],
)
def test_a_wrong_field_is_named(model: Path, file: str, fields: dict[str, Any], told: str) -> None:
    edit(model / file, **fields)
    with pytest.raises(ConfigError, match=told):
        read(model)


def test_a_missing_field_and_a_missing_token(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    del config["max_source_positions"]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="has no max_source_positions"):
        read(model)
    text = (model / "tokenizer.json").read_text().replace("<|startofprev|>", "<|other|>")
    (model / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"has no token .*startofprev"):
        read(model)
