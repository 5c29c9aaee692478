"""Encoders: transformers' own hidden states and logits, whatever is read beside, and no generation."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.engine.encoder_runner import batches
from kvferry.engine.engine import Engine
from kvferry.engine.events import Failed
from kvferry.engine.models.base import ForwardAbandoned
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import WorkerSettings
from kvferry.protocol.work import Classify, Embed
from kvferry.worker.engine_factory import assemble
from kvferry.worker.engine_parts import describe
from kvferry.worker.rates import warm_up
from tests.engine.reading import accounts, finish, reading, vectors
from tests.engine.tiny_encoders import FAMILIES, VOCAB, oracle_hidden, oracle_logits, save_encoder
from tests.toy import make_job

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (1, 5, 64, 33, 12, 6, 40)


def engine_of(path: Path, **settings: object) -> Engine:
    given = {"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 48, **settings}
    return assemble(WorkerSettings(model=str(path), **given)).engine  # type: ignore[arg-type]


def text(length: int) -> list[int]:
    """Without the padding token, which XLM-R's positions leave out wherever it stands."""
    return random.Random(length).choices(range(3, VOCAB), k=length)


def close(found: np.ndarray, wanted: torch.Tensor) -> None:
    np.testing.assert_allclose(found, np.asarray(wanted), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_in_batches_equal_each_text_alone(family: str, tmp_path: Path) -> None:
    engine = engine_of(save_encoder(tmp_path, family))
    for length in LENGTHS:
        engine.add(reading(f"mean{length}", text(length), Embed("mean", False)))
        engine.add(reading(f"cls{length}", text(length), Embed("cls", True)))
        engine.add(reading(f"last{length}", text(length), Embed("last", False, 5)))
    finish(engine)
    found = vectors(engine)
    for length in LENGTHS:
        hidden = oracle_hidden(tmp_path, text(length))
        close(found[f"mean{length}"], hidden.mean(0))
        close(found[f"cls{length}"], hidden[0] / hidden[0].norm())
        close(found[f"last{length}"], hidden[-1][:5])
    assert all(account.balanced and account.cached_len == 0 for account in accounts(engine).values())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_pairs_in_batches_equal_each_pair_alone(family: str, tmp_path: Path) -> None:
    save_encoder(tmp_path, family, kind="AutoModelForSequenceClassification", num_labels=3)
    typed = family in ("BertConfig", "ElectraConfig")
    engine = engine_of(tmp_path)
    for length in LENGTHS:
        engine.add(reading(f"one{length}", text(length), Classify()))
        engine.add(reading(f"pair{length}", text(length), Classify(length // 2 if typed else 0)))
    finish(engine)
    found = vectors(engine)
    for length in LENGTHS:
        close(found[f"one{length}"], oracle_logits(tmp_path, text(length)))
        close(found[f"pair{length}"], oracle_logits(tmp_path, text(length), length // 2 if typed else 0))
    if typed:
        assert np.abs(found["one64"] - found["pair64"]).max() > 1e-3, "token types must tell"


def test_modernbert_may_pool_over_all_for_its_head(tmp_path: Path) -> None:
    save_encoder(
        tmp_path, "ModernBertConfig", kind="AutoModelForSequenceClassification", num_labels=2, classifier_pooling="mean"
    )
    engine = engine_of(tmp_path)
    for length in (3, 40, 50):
        engine.add(reading(f"{length}", text(length), Classify()))
    finish(engine)
    for length in (3, 40, 50):
        close(vectors(engine)[f"{length}"], oracle_logits(tmp_path, text(length)))


def test_a_step_takes_whole_texts_within_its_budget_and_ends_what_it_began(tmp_path: Path) -> None:
    engine = engine_of(save_encoder(tmp_path, "BertConfig"))
    for number in range(12):
        engine.add(reading(f"e{number}", text(20), Embed("mean")))
    done = []
    while engine.has_work():
        assert engine.step()
        done.append(len(vectors(engine)))
        assert not engine.request_table.running
    assert done == [3, 6, 9, 12], "48 tokens: two texts of 20, and one that may exceed it"


def test_what_was_not_wanted_is_read_again_when_somebody_is_left(tmp_path: Path) -> None:
    engine = engine_of(save_encoder(tmp_path, "BertConfig"))
    for length in (1, 9):
        engine.add(reading(f"e{length}", text(length), Embed("mean", False)))
    run, engine.runner.run = engine.runner.run, _gives_up  # type: ignore[method-assign]
    assert engine.step()
    assert not vectors(engine)
    engine.runner.run = run  # type: ignore[method-assign]
    engine.cancel("e9", 0)
    finish(engine)
    close(vectors(engine)["e1"], oracle_hidden(tmp_path, text(1)).mean(0))


def _gives_up(*_: Any, **__: Any) -> Any:
    raise ForwardAbandoned


def test_an_encoder_refuses_what_it_cannot(tmp_path: Path) -> None:
    engine = engine_of(save_encoder(tmp_path, "BertConfig"))
    engine.add(make_job("g", [5, 6]))
    engine.add(reading("c", [5, 6], Classify()))
    engine.add(reading("long", text(67), Embed()))
    errors = {event.key[0]: event.error for event in engine.events if isinstance(event, Failed)}
    assert errors["g"].message == f"the model {tmp_path.name} does not generate"
    assert errors["c"].message == f"the model {tmp_path.name} does not classify"
    assert errors["long"].code == "context_length_exceeded"


def test_a_node_of_an_encoder_needs_no_pool_to_speak_of(tmp_path: Path) -> None:
    parts = assemble(WorkerSettings(model=str(save_encoder(tmp_path, "XLMRobertaConfig")), dtype="float32"))
    assert parts.kv.nbytes < 2**20
    assert parts.max_model_len == 64, "positions begin behind the padding token's"
    assert describe(parts)["kv_pool"] == "none"
    rates = warm_up(parts.engine)
    assert rates.prefill_tokens_per_s > 0
    parts.engine.check_integrity()


def test_the_dense_module_of_an_encoder(tmp_path: Path) -> None:
    save_encoder(tmp_path, "BertConfig")
    linear = torch.nn.Linear(32, 7, bias=False)
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps({"out_features": 7}))
    torch.save({"linear.weight": linear.weight}, tmp_path / "2_Dense" / "pytorch_model.bin")
    modules = [{"type": "a.Transformer", "path": ""}, {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    engine = engine_of(tmp_path)
    engine.add(reading("e", text(20), Embed("mean", False)))
    finish(engine)
    with torch.inference_mode():
        close(vectors(engine)["e"], linear(oracle_hidden(tmp_path, text(20)).mean(0)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantization": "int8"}, "--quantization needs a decoder"),
        ({"batch_invariant": True}, "--batch-invariant needs a decoder"),
        ({"enable_expert_parallel": True}, "--enable-expert-parallel needs a decoder"),
        ({"max_model_len": 67}, "at most 66 tokens"),
    ],
)
def test_what_is_for_decoders_alone_is_refused(settings: dict[str, object], words: str, tmp_path: Path) -> None:
    save_encoder(tmp_path, "BertConfig")
    with pytest.raises(ConfigError, match=words):
        engine_of(tmp_path, **settings)


def test_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = save_encoder(tmp_path, "BertConfig") / "model.safetensors"
    tensors = load_file(file)
    save_file(
        {name: value for name, value in tensors.items() if not name.startswith("pooler.")}, file, {"format": "pt"}
    )
    assemble(WorkerSettings(model=str(tmp_path), dtype="float32"))
    gone = next(name for name in tensors if "layer.1" in name)
    save_file({name: value for name, value in tensors.items() if name != gone}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match="lack the tensor"):
        assemble(WorkerSettings(model=str(tmp_path), dtype="float32"))


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [
        ([], []),
        ([5], [[0]]),
        ([4, 8, 6, 3], [[1, 2, 0], [3]]),
        ([9000, 9000, 1], [[0], [1], [2]]),
        ([100] * 200, [list(range(163)), list(range(163, 200))]),
    ],
)
def test_batches_pad_little(lengths: list[int], wanted: list[list[int]]) -> None:
    assert list(batches(lengths)) == wanted
