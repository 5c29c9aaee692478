"""Clusters of models that transcribe speech have decode nodes alone."""

import json
from pathlib import Path

import pytest

from kvferry.cli.preflight import speech_settings
from kvferry.model_files.source import ModelSource
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import ServeSettings


def source(folder: Path, model_type: str) -> ModelSource:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return ModelSource("hf", folder, folder.name, "")


def test_a_cluster_of_speech_has_no_prefill_workers(tmp_path: Path) -> None:
    speech, text = source(tmp_path / "speech", "whisper"), source(tmp_path / "text", "llama")
    assert speech_settings(ServeSettings(), [speech]).prefill == 0
    assert speech_settings(ServeSettings(prefill=2), [text]).prefill == 2
    assert speech_settings(ServeSettings(prefill=0), [speech, text]).prefill == 0
    with pytest.raises(ConfigError) as error:
        speech_settings(ServeSettings(), [speech, text])
    assert error.value.param == "prefill"
    with pytest.raises(ConfigError) as error:
        speech_settings(ServeSettings(encode=1), [speech])
    assert error.value.param == "encode"
