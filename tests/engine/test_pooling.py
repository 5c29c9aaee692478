"""Embeddings of decoders: transformers' hidden states, pooled, whatever the chunks, the neighbours and the cache."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kvferry.engine.engine import Engine
from kvferry.engine.events import Failed, Generated
from kvferry.engine.models.hf import transformers_module
from kvferry.protocol.errors import ContextLengthExceeded, InvalidRequest
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.settings import WorkerSettings
from kvferry.protocol.work import POOLINGS, Classify, Embed, Generate
from kvferry.worker.engine_factory import assemble
from tests.engine.reading import accounts, finish, reading, vectors
from tests.engine.tiny_models import OURS, save_tiny, tokens_for
from tests.toy import make_engine, make_job

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (45, 1, 8, 19, 64)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama3")
    save_tiny(OURS["llama3"](), path)
    return path


@torch.inference_mode()
def hidden_states(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    """transformers' own, after the final norm, float32 [T, hidden]."""
    model = transformers_module().AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return torch.as_tensor(model.eval()(input_ids=tokens[None]).last_hidden_state[0])


def pooled(hidden: torch.Tensor, work: Embed) -> np.ndarray:
    """By the definitions of sentence-transformers."""
    vector = {"last": hidden[-1], "cls": hidden[0], "mean": hidden.mean(0)}[work.pooling][: work.dimensions or None]
    return np.asarray(vector / vector.norm() if work.normalize else vector)


def engine_of(path: Path, *, budget: int = 16, blocks: int = 64, impl: str = "auto") -> Engine:
    settings = WorkerSettings(
        model=str(path),
        dtype="float32",
        kernels="reference",
        block_size=8,
        kv_blocks=blocks,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        max_prefill_tokens_while_decoding=budget,
        model_impl=impl,
    )
    return assemble(settings).engine


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("impl", ["kvferry", "transformers"])
def test_vectors_are_those_of_transformers_in_chunks_and_beside_streams(llama: Path, pooling: str, impl: str) -> None:
    work = Embed(pooling)
    engine, prompts = engine_of(llama, impl=impl), {f"e{n}": tokens_for(n, n) for n in LENGTHS}
    engine.add(make_stream("s", 30))
    engine.step()
    for name, tokens in prompts.items():
        engine.add(reading(name, tokens.tolist(), work))
    finish(engine)
    found = vectors(engine)
    assert found.keys() == prompts.keys()
    for name, tokens in prompts.items():
        close(found[name], pooled(hidden_states(llama, tokens), work))
    assert sum(len(event.delta.token_ids) for event in engine.events if isinstance(event, Generated)) == 30


def make_stream(name: str, tokens: int) -> Job:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return Job(name, 0, (3, 1, 4), 3, Generate(params), "router")


@pytest.mark.parametrize(
    "work", [Embed("last", False), Embed("mean", True, 7), Embed("last", False, 64), Embed("cls", False, 1)]
)
def test_cut_and_normalised(llama: Path, work: Embed) -> None:
    engine, tokens = engine_of(llama), tokens_for(21)
    engine.add(reading("e", tokens.tolist(), work))
    finish(engine)
    found = vectors(engine)["e"]
    assert len(found) == (work.dimensions or 64)
    assert not work.normalize or np.linalg.norm(found) == pytest.approx(1.0, abs=1e-5)
    close(found, pooled(hidden_states(llama, tokens), work))


@pytest.mark.parametrize(("pooling", "cached"), [("last", 40), ("mean", 0), ("cls", 0)])
def test_a_cached_prefix_is_used_where_the_pooling_allows_it(llama: Path, pooling: str, cached: int) -> None:
    engine, tokens = engine_of(llama), tokens_for(48)
    for name in ("first", "second"):
        engine.add(reading(name, tokens.tolist(), Embed(pooling)))
        finish(engine)
    account = accounts(engine)["second"]
    assert account.balanced
    assert (account.cached_len, account.computed) == (cached, 48 - cached)
    close(vectors(engine)["second"], vectors(engine)["first"])
    close(vectors(engine)["first"], pooled(hidden_states(llama, tokens), Embed(pooling)))
    engine.add(make_stream_of(tokens.tolist()))
    finish(engine)
    assert accounts(engine)["gen"].cached_len == 40, "what was computed for a vector serves generations too"


def make_stream_of(tokens: list[int]) -> Job:
    return Job("gen", 0, tuple(tokens), len(tokens), Generate(SamplingParams(max_tokens=1, temperature=0.0)), "router")


def test_a_preempted_prompt_begins_its_sum_anew(llama: Path) -> None:
    engine, tokens = engine_of(llama), tokens_for(45)
    engine.add(reading("e", tokens.tolist(), Embed("mean")))
    engine.step()
    (request,) = engine.request_table.running
    assert request.pooled is not None
    engine.scheduler.preempt(request)
    assert request.pooled is None
    finish(engine)
    close(vectors(engine)["e"], pooled(hidden_states(llama, tokens), Embed("mean")))


def test_a_cancelled_one_gives_its_blocks_back(llama: Path) -> None:
    engine = engine_of(llama)
    engine.add(reading("e", tokens_for(60).tolist(), Embed("mean")))
    engine.step()
    engine.cancel("e", 0)
    finish(engine)
    assert not vectors(engine)
    assert [event.error.code for event in engine.events if isinstance(event, Failed)] == ["cancelled"]


def test_a_flood_leaves_streams_their_pace(llama: Path) -> None:
    engine = engine_of(llama, budget=16)
    engine.add(make_stream("s", 20))
    for number in range(40):
        engine.add(reading(f"e{number}", tokens_for(30, number).tolist(), Embed("last")))
    for step in range(21):
        assert engine.step()
        drawn = sum(len(e.delta.token_ids) for e in engine.events if isinstance(e, Generated) and e.key[0] == "s")
        assert drawn == min(step + 1, 20), "a stream gets a token in every step"
    finish(engine)
    assert len(vectors(engine)) == 40


@pytest.mark.parametrize(
    ("work", "length", "error"),
    [
        (Classify(), 5, InvalidRequest),
        (Embed("max"), 5, InvalidRequest),
        (Embed(dimensions=-1), 5, InvalidRequest),
        (Embed(), 257, ContextLengthExceeded),
        (Embed(), 0, ContextLengthExceeded),
    ],
)
def test_what_a_decoder_cannot_do_is_refused(work: Embed | Classify, length: int, error: type[Exception]) -> None:
    engine = make_engine(128)
    engine.add(reading("e", [5] * length, work))
    (failed,) = [event for event in engine.events if isinstance(event, Failed)]
    assert type(failed.error) is error
    assert not engine.has_work()


def test_a_prompt_may_fill_the_context_since_nothing_comes_behind_it() -> None:
    engine = make_engine(128)
    engine.add(reading("e", [5] * 256, Embed(normalize=False)))
    finish(engine)
    assert vectors(engine)["e"].shape == (1,)


def test_numbers_that_are_none_end_the_request_alone() -> None:
    engine = make_engine()
    forward = engine.runner.model.forward  # type: ignore[attr-defined]

    def broken(token_ids: torch.Tensor, *rest: object) -> torch.Tensor:
        hidden: torch.Tensor = forward(token_ids, *rest)
        return torch.where((token_ids == 99)[:, None], torch.nan, hidden)

    engine.runner.model.forward = broken  # type: ignore[attr-defined]
    engine.add(reading("bad", [1, 2, 99], Embed()))
    engine.add(reading("good", [1, 2, 3], Embed()))
    engine.add(make_job("stream", [4, 5], 3))
    finish(engine)
    assert [(event.key[0], event.error.code) for event in engine.events if isinstance(event, Failed)] == [
        ("bad", "model_failed")
    ]
    assert vectors(engine).keys() == {"good"}


def test_modules_of_the_model_s_files(tmp_path: Path) -> None:
    """Pooling, a dense layer with an activation, normalisation: as sentence-transformers writes them."""
    save_tiny(OURS["qwen3"](), tmp_path)
    linear = torch.nn.Linear(64, 12)
    dense = tmp_path / "2_Dense"
    dense.mkdir()
    settings = {"in_features": 64, "out_features": 12, "activation_function": "torch.nn.modules.activation.Tanh"}
    (dense / "config.json").write_text(json.dumps(settings))
    torch.save({f"linear.{name}": tensor for name, tensor in linear.state_dict().items()}, dense / "pytorch_model.bin")
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense"), ("Normalize", "3_Normalize")]
    modules = [
        {"idx": i, "type": f"sentence_transformers.models.{kind}", "path": at} for i, (kind, at) in enumerate(kinds)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    engine, tokens = engine_of(tmp_path), tokens_for(33)
    engine.add(reading("e", tokens.tolist(), Embed("mean")))
    finish(engine)
    with torch.inference_mode():
        wanted = torch.tanh(linear(hidden_states(tmp_path, tokens).mean(0)))
    close(vectors(engine)["e"], np.asarray(wanted / wanted.norm()))
