"""A node with a draft model: what it loads, what it refuses, and what that takes of its memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models

from kvferry.engine.draft_model import MAX_CATCH_UP
from kvferry.engine.models.hf import transformers_module
from kvferry.engine.models.loader import load_model
from kvferry.engine.state_rows import ROWS
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker.draft_factory import draft_rows
from kvferry.worker.engine_factory import assemble
from kvferry.worker.rates import warm_up

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}


def save(path: Path, layers: int, words: int = 90, *, recurrent: bool = False) -> str:
    """A tiny model whose tokenizer knows so many words; recurrent: every other layer is a short convolution."""
    transformers = transformers_module()
    if recurrent:
        kinds = ["conv", "full_attention"] * (layers // 2)
        config = transformers.Lfm2Config(**SHAPE, num_hidden_layers=layers, layer_types=kinds)
    else:
        config = transformers.LlamaConfig(**SHAPE, num_hidden_layers=layers)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    if words:
        Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0")).save(
            str(path / "tokenizer.json")
        )
    return str(path)


def settings(path: Path, **given: object) -> WorkerSettings:
    model = path / "model"
    if not model.exists():
        save(model, 4)
    named = {"num_speculative_tokens": 3, "device": "cpu", "kv_cache_gib": 0.01} | given
    return WorkerSettings(model=str(model), **named)  # type: ignore[arg-type]


def test_both_pools_share_what_memory_is_given(tmp_path: Path) -> None:
    small = save(tmp_path / "small", 2)
    alone, both = (assemble(settings(tmp_path, speculative_model=model)) for model in ("", small))
    assert alone.engine.draft_model is None
    draft = both.engine.draft_model
    assert draft is not None
    assert draft.pool.num_blocks == both.engine.pool.num_blocks
    assert draft.runner.model.info.num_layers == 2
    assert both.engine.pool.num_blocks == pytest.approx(alone.engine.pool.num_blocks * 4 / 6, abs=1)
    assert both.fingerprint == alone.fingerprint, "who has none, or another one, can be its peer"
    warm_up(both.engine)
    both.engine.check_integrity()


def test_a_node_of_prompts_loads_none(tmp_path: Path) -> None:
    given = settings(tmp_path, speculative_model=save(tmp_path / "small", 2), role="prefill")
    assert assemble(given).engine.draft_model is None


@pytest.mark.parametrize(
    ("words", "given", "told"),
    [
        (80, {}, "small has a vocabulary of 80 tokens, model has another of 90"),
        (90, {"num_speculative_tokens": 0}, "needs --num-speculative-tokens of at least 1"),
        (90, {"speculative_model": "/nowhere"}, "no such model: /nowhere"),
    ],
)
def test_what_cannot_draft_is_refused(tmp_path: Path, words: int, given: dict[str, object], told: str) -> None:
    small = save(tmp_path / "small", 2, words)
    with pytest.raises(ConfigError, match=told) as refused:
        assemble(settings(tmp_path, **{"speculative_model": small, **given}))
    assert refused.value.param == "speculative_model"


def test_a_model_with_recurrent_layers_has_drafts_and_rows_for_their_states(tmp_path: Path) -> None:
    save(tmp_path / "model", 4, recurrent=True)
    engine = assemble(settings(tmp_path, speculative_model=save(tmp_path / "small", 2), max_num_seqs=4)).engine
    assert engine.stepper._speculation
    assert engine.draft_model is not None
    assert engine.runner.states is not None
    assert len(engine.runner.states.rows) == 5 * (ROWS + 3), "all streams, and the one that may come beside them"
    warm_up(engine)
    engine.check_integrity()
    many = assemble(settings(tmp_path, max_num_seqs=64)).engine.runner.states
    assert many is not None
    assert len(many.rows) == 66 * ROWS, "the rows of requests that do not run are enough"


@pytest.mark.parametrize("recurrent", [False, True])
def test_one_with_recurrent_layers_has_rows_for_its_states(recurrent: bool, tmp_path: Path) -> None:
    save(tmp_path / "model", 4, recurrent=recurrent)
    small = save(tmp_path / "small", 2, recurrent=True)
    engine = assemble(settings(tmp_path, speculative_model=small, max_num_seqs=4)).engine
    assert engine.draft_model is not None
    states = engine.draft_model.runner.states
    assert states is not None
    assert len(states.rows) == 5 + 8 * (1 + MAX_CATCH_UP + 3), "of all streams, and of eight with all drafts"
    warm_up(engine)
    engine.check_integrity()


def test_a_draft_model_whose_states_have_no_room_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "model", 4)
    small = load_model(resolve(save(tmp_path / "small", 2, recurrent=True)), device=CPU, dtype=None, ops=ReferenceOps())
    with pytest.raises(ConfigError, match="one stream's states of small take") as refused:
        draft_rows(small, settings(tmp_path), 10 * small.info.state_floats)
    assert refused.value.param == "speculative_model"


def test_an_equal_count_of_other_tokens_is_another_vocabulary(tmp_path: Path) -> None:
    small = save(tmp_path / "small", 2)
    file = tmp_path / "small/tokenizer.json"
    body = json.loads(file.read_text())
    body["model"]["vocab"] = {f"w{i}": (i + 1) % 90 for i in range(90)}
    file.write_text(json.dumps(body))
    with pytest.raises(ConfigError, match="vocabulary of 90 tokens, model has another of 90"):
        assemble(settings(tmp_path, speculative_model=small))


def test_without_a_tokenizer_sizes_decide(tmp_path: Path) -> None:
    assert assemble(settings(tmp_path, speculative_model=save(tmp_path / "small", 2, 0))).engine.draft_model


def test_prefixes_are_kept_by_neither_pool_where_they_are_not_to_be(tmp_path: Path) -> None:
    small = save(tmp_path / "small", 2)
    engine = assemble(settings(tmp_path, speculative_model=small, enable_prefix_caching=False)).engine
    assert engine.draft_model is not None
    assert not engine.pool.prefix_caching
    assert not engine.draft_model.pool.prefix_caching


def test_one_whose_first_step_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = assemble(settings(tmp_path, speculative_model=save(tmp_path / "small", 2))).engine
    assert engine.draft_model is not None

    def run(slices: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(engine.draft_model.runner, "run", run)
    with pytest.raises(ConfigError, match="small cannot be run: its first step failed with RuntimeError") as caught:
        warm_up(engine)
    assert caught.value.param == "speculative_model"
