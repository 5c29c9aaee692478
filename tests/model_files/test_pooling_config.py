"""What a model is for, as its files tell it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from kvferry.model_files.pooling_config import PoolingConfig, read_task
from kvferry.model_files.source import read_facts, resolve
from kvferry.model_files.unsupported_models import require_runnable
from kvferry.protocol.errors import ConfigError
from tests.gguf_files import finish

BERT = {"model_type": "bert", "vocab_size": 9, "hidden_size": 32, "max_position_embeddings": 512, "type_vocab_size": 2}
LLAMA = {"model_type": "llama", "vocab_size": 9, "hidden_size": 48, "max_position_embeddings": 512}
ROBERTA = BERT | {"model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1, "type_vocab_size": 1}
HEAD = {"architectures": ["BertForSequenceClassification"]}


def write(path: Path, name: str, value: Any) -> None:
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_text(json.dumps(value))


def task(path: Path, config: dict[str, Any], pooling: str = "auto", **files: Any) -> PoolingConfig:
    write(path, "config.json", config)
    for name, value in files.items():
        write(path, name, value)
    return read_task(resolve(str(path), weights=False), pooling)


def modules(*kinds: str) -> list[dict[str, str]]:
    named = {"Pooling": "1_Pooling", "Dense": "2_Dense", "Normalize": "3_Normalize", "Transformer": ""}
    return [{"type": f"sentence_transformers.models.{kind}", "path": named.get(kind, "x")} for kind in kinds]


def test_without_a_word_of_the_files(tmp_path: Path) -> None:
    assert task(tmp_path, LLAMA) == PoolingConfig("generate", False, "last", True, 48)
    assert task(tmp_path, BERT) == PoolingConfig("embed", True, "mean", True, 32)
    assert task(tmp_path, BERT, "cls").pooling == "cls"
    assert task(tmp_path, BERT | {"is_decoder": True}).kind == "generate"


def test_the_demo_model() -> None:
    assert read_task(resolve("smollm2", weights=False)) == PoolingConfig("generate", False, "last", True, 576)


@pytest.mark.parametrize(
    ("said", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True, "word_embedding_dimension": 32}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_modules_of_sentence_transformers(said: dict[str, Any], pooling: str, tmp_path: Path) -> None:
    files: dict[str, Any] = {"modules.json": modules("Transformer", "Pooling"), "1_Pooling/config.json": said}
    assert task(tmp_path, BERT, **files) == PoolingConfig("embed", True, pooling, False, 32)
    write(tmp_path, "2_Dense/config.json", {"in_features": 32, "out_features": 8})
    write(tmp_path, "modules.json", modules("Transformer", "Pooling", "Dense", "Normalize"))
    assert task(tmp_path, LLAMA) == PoolingConfig("generate", False, pooling, True, 8, ("2_Dense",))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"pooling_mode_max_tokens": True}, "pooling 'max'.*--pooling"),
        ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True}, "2 poolings"),
        ({}, "0 poolings"),
    ],
)
def test_a_pooling_that_is_not_supported(said: dict[str, Any], words: str, tmp_path: Path) -> None:
    files: dict[str, Any] = {"modules.json": modules("Transformer", "Pooling"), "1_Pooling/config.json": said}
    with pytest.raises(ConfigError, match=words):
        task(tmp_path, BERT, **files)


def test_another_may_be_chosen_in_its_place(tmp_path: Path) -> None:
    said = {"pooling_mode_max_tokens": True}
    files: dict[str, Any] = {"modules.json": modules("Transformer", "Pooling"), "1_Pooling/config.json": said}
    assert task(tmp_path, BERT, "cls", **files).pooling == "cls"


@pytest.mark.parametrize("listed", [modules("Transformer", "CLIPModel"), {}, [1]])
def test_modules_that_make_no_sense_here(listed: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        task(tmp_path, BERT, **{"modules.json": listed})


def test_heads(tmp_path: Path) -> None:
    moods = task(tmp_path, BERT | HEAD | {"id2label": {"0": "sad", "1": "glad"}})
    assert moods == PoolingConfig("classify", True, labels=("sad", "glad"), activation="softmax", typed=True)
    assert not moods.scores_pairs
    tags = task(
        tmp_path, BERT | HEAD | {"id2label": {"0": "a", "1": "b"}, "problem_type": "multi_label_classification"}
    )
    assert tags.activation == "sigmoid"
    cross = task(tmp_path, ROBERTA | HEAD | {"id2label": {"0": "LABEL_0"}})
    assert (cross.scores_pairs, cross.activation, cross.typed) == (True, "sigmoid", False)
    for named in ("torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"):
        own = {"id2label": {"0": "LABEL_0"}, "sentence_transformers": {"activation_fn": named}}
        wanted = "none" if named.endswith("Identity") else "sigmoid"
        assert task(tmp_path, BERT | HEAD | own).activation == wanted


def test_lengths(tmp_path: Path) -> None:
    task(tmp_path, ROBERTA)
    assert read_facts(resolve(str(tmp_path), weights=False)).max_model_len == 512
    files: dict[str, Any] = {"sentence_bert_config.json": {"max_seq_length": 128}}
    task(tmp_path, ROBERTA, **files)
    assert read_facts(resolve(str(tmp_path), weights=False)).max_model_len == 128


def test_a_head_on_a_decoder_is_refused(tmp_path: Path) -> None:
    task(tmp_path, LLAMA | {"architectures": ["LlamaForSequenceClassification"]})
    with pytest.raises(ConfigError, match="classification head"):
        require_runnable(resolve(str(tmp_path), weights=False))


@pytest.mark.parametrize(("number", "pooling"), [(1, "mean"), (2, "cls"), (3, "last"), (0, "last")])
def test_gguf(number: int, pooling: str, tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_embedding_length(24)
    writer.add_uint32("llama.pooling_type", number)
    writer.add_tensor("token_embd.weight", np.zeros((4, 24), np.float32))
    finish(writer)
    assert read_task(resolve(str(tmp_path / "m.gguf"), weights=False)) == PoolingConfig(
        "generate", False, pooling, True, 24
    )
