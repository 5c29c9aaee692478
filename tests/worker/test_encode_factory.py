"""An encode node's engine: the pool and the fingerprint of the model's other nodes, its tower, and no decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.engine.models.loader import read_info
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError, InvalidRequest
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker.encode_factory import ModelOutline
from kvferry.worker.engine_factory import assemble
from tests.engine.tiny_vision import chat, picture, save
from tests.toy import make_job


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save("smolvlm", path := tmp_path_factory.mktemp("models") / "seer")
    return path


def settings(model: Path, role: str = "encode", **more: Any) -> WorkerSettings:
    return WorkerSettings(model=str(model), role=role, dtype="float32", kv_blocks=64, device="cpu", **more)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16"])
def test_its_fingerprint_and_its_rows_are_those_of_a_whole_node(model: Path, kv_cache_dtype: str) -> None:
    encode = assemble(settings(model, kv_cache_dtype=kv_cache_dtype))
    prefill = assemble(settings(model, "prefill", kv_cache_dtype=kv_cache_dtype))
    assert encode.fingerprint == prefill.fingerprint
    assert encode.layout == prefill.layout
    assert encode.modalities == prefill.modalities == ("image",)
    assert encode.media_row_bytes == prefill.media_row_bytes > 0
    assert encode.media is not None
    assert prefill.media is not None
    image = encode.media.encoder.render(chat(["What?", picture(60, 40)])).media
    (rows,), (own,) = (each.encoder.encode(image) for each in (encode.media, prefill.media))
    assert rows.equal(own)


def test_no_weight_of_the_decoder_is_read(model: Path) -> None:
    parts = assemble(settings(model))
    outline = parts.engine.runner.model
    assert isinstance(outline, ModelOutline)
    assert not hasattr(outline, "parameters")
    with pytest.raises(AssertionError, match="computes no steps"):
        parts.engine.runner.run([])


def test_it_takes_no_requests(model: Path) -> None:
    engine = assemble(settings(model)).engine
    with pytest.raises(InvalidRequest, match="does not generate"):
        engine._admission.check(make_job("a", [1, 2]))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"quantization": "int8"}, "quantization"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"language_model_only": True}, "model"),
        ({"limit_mm_per_prompt": '{"image": 0}'}, "model"),
        ({"model_impl": "transformers"}, "model_impl"),
    ],
)
def test_what_it_does_not_support_is_refused_by_name(model: Path, more: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as raised:
        assemble(settings(model, **more))
    assert raised.value.param == param


def test_quantised_weights_and_other_forms_have_no_facts_before_they_are_read(model: Path, tmp_path: Path) -> None:
    (copy := tmp_path / "quantised").mkdir()
    for file in model.iterdir():
        (copy / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps(config))
    assert read_info(resolve(str(model)), "auto", 0) is not None
    assert read_info(resolve(str(copy)), "auto", 0) is None
