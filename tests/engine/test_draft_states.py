"""Draft models with recurrent layers: what a stream refuses is taken back, and texts stay those without drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.budget import Limits
from kvferry.engine.draft_model import MAX_CATCH_UP, DraftModel
from kvferry.engine.draft_states import DraftRows
from kvferry.engine.engine import Engine, EngineConfig
from kvferry.engine.ledger import Ledger
from kvferry.engine.models.base import Model
from kvferry.engine.models.loader import load_model
from kvferry.engine.ngram_drafts import NgramDrafts
from kvferry.engine.runner import Runner
from kvferry.engine.shared_cores.core_turns import CoreTurns
from kvferry.engine.state_memory import StateMemory, make_rows
from kvferry.engine.state_rows import ROWS, StateRowPool
from kvferry.kernels.cpu import CpuOps, instruction_sets
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.source import resolve
from tests.engine.test_draft_model import BLOCK, eager, left_nothing, make_engine
from tests.engine.test_draft_model_real import texts
from tests.engine.test_speculation import figures, finish, prompt
from tests.engine.tiny_hybrids import HYBRIDS
from tests.engine.tiny_models import VOCAB as WORDS
from tests.engine.tiny_models import save_tiny
from tests.guessing_toys import GuessingStates
from tests.recurrent_toy import STATE_FLOATS, make_recurrent
from tests.toy import VOCAB, expected, make_job, tokens_of

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def test_a_state_that_is_not_kept_costs_the_tokens_after_the_last_one_that_is() -> None:
    """A stream that was drafted for again after an abandoned step was computed anew from its first token."""
    rows = DraftRows(StateRowPool(5), [])
    assert rows.reserve(3)
    rows.record(40)
    rows.record(20)
    rows.record(1)
    assert rows.rewind(59) == 40
    assert (rows.before, rows.length, rows.kept) == (rows.kept[40], 40, {40: rows.before})
    assert rows.rewind(39) == 0
    rows.pool.check([rows])


def make_draft(model: GuessingStates, blocks: int = 64, chunk: int = 8, rows: int = 200) -> DraftModel:
    kv = torch.full((blocks, 1, 2, 1, BLOCK, 1), -1.0)
    runner = Runner(model, kv, BLOCK, states=StateMemory(make_rows(rows, STATE_FLOATS, CPU), kv))
    return DraftModel(runner, BlockPool(blocks, Ledger(blocks)), chunk, VOCAB, CoreTurns())


@pytest.fixture(autouse=True)
def always_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    eager(monkeypatch)


def free_rows(draft: DraftModel | None) -> int:
    assert draft is not None
    assert draft._states is not None
    return draft._states._pool.free


def test_right_drafts_save_steps() -> None:
    model = GuessingStates()
    engine = make_engine(make_draft(model))
    engine.add(make_job("a", prompt(9), 41))
    assert finish(engine) <= 1 + 1 + 8 + 40 // 5 + 2
    assert tokens_of(engine, "a") == expected(prompt(9), 41)
    made, drafted, accepted = figures(engine)
    assert made == 40
    assert drafted == accepted > 25
    assert model.faulty == 0
    assert left_nothing(engine)
    assert free_rows(engine.draft_model) == 200


@pytest.mark.parametrize("most", [1, 4, 7])
@pytest.mark.parametrize("period", [2, 3, 5, 7])
@pytest.mark.usefixtures("alone")
def test_wrong_drafts_are_taken_back_and_what_was_right_is_not_computed_again(period: int, most: int) -> None:
    model = GuessingStates(lambda place: place % period != 0)
    engine = make_engine(make_draft(model, chunk=64), most=most)
    engine.add(make_job("a", prompt(10), 90))
    finish(engine)
    assert tokens_of(engine, "a") == expected(prompt(10), 90)
    assert model.faulty == 0
    _, drafted, accepted = figures(engine)
    assert drafted > accepted > 0
    assert max(model.rows[1:]) <= MAX_CATCH_UP, "it begins where it went wrong, not at the prompt"
    assert left_nothing(engine)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else drafts."""
    monkeypatch.setattr(NgramDrafts, "propose", lambda self, most: setattr(self, "found", ()))


def test_a_recurrent_model_drafts_for_a_recurrent_model() -> None:
    model = GuessingStates(lambda place: place % 4 != 0)
    engine = make_recurrent(drafts=4)
    drafting = make_draft(model)
    made = Engine(
        EngineConfig(engine.config.fingerprint, BLOCK, 256, Limits(16, 8, 8), drafts=4, state_stride=8),
        engine.runner, engine.pool, drafting,
    )  # fmt: skip
    for name in "abc":
        made.add(make_job(name, prompt(9, ord(name)), 40))
    finish(made)
    for name in "abc":
        assert tokens_of(made, name) == expected(prompt(9, ord(name)), 40)
    assert model.faulty == 0
    assert figures(made)[2] > 0
    assert free_rows(drafting) == 200


@settings(max_examples=60, deadline=None)
@given(
    wrong=st.sets(st.integers(0, 11)),
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=5),
    blocks=st.integers(20, 60),
    own=st.integers(2, 60),
    rows=st.integers(1, 40),
    most=st.integers(1, 12),
    cancelled=st.integers(0, 40),
)
def test_any_drafts_where_blocks_and_rows_are_few_and_a_stream_is_cancelled(
    wrong: set[int], lengths: list[tuple[int, int]], blocks: int, own: int, rows: int, most: int, cancelled: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        eager(patch)
        model = GuessingStates(lambda place: place % 12 not in wrong)
        engine = make_engine(make_draft(model, own, rows=rows), blocks, most)
        for number, (length, count) in enumerate(lengths):
            engine.add(make_job(str(number), prompt(length, number), count))
        engine.add(make_job("gone", prompt(9, 77), 100))
        for _ in range(cancelled):
            engine.step()
            engine.check_integrity()
        engine.cancel("gone", 0)
        engine.check_integrity()
        finish(engine)
        for number, (length, count) in enumerate(lengths):
            assert tokens_of(engine, str(number)) == expected(prompt(length, number), count)
        assert model.faulty == 0
        assert left_nothing(engine)
        assert free_rows(engine.draft_model) == rows


def test_a_step_that_fails_after_its_drafts_costs_a_computation_anew_and_no_token() -> None:
    model = GuessingStates()
    engine = make_engine(make_draft(model))
    engine.add(make_job("a", prompt(9), 60))
    for _ in range(9):
        engine.step()
    (request,) = engine.request_table.running
    draft = engine.draft_model
    assert draft is not None
    assert draft.draft([(request, 4)]) == draft.draft([(request, 4)]), "the stream stands where it stood"
    finish(engine)
    assert tokens_of(engine, "a") == expected(prompt(9), 60)
    assert model.faulty == 0


@pytest.fixture(params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "reference":
        return ReferenceOps()
    if not instruction_sets():
        pytest.skip("installed without the CPU extension")
    return CpuOps(1)


def load(path: Path, name: str, ops: Ops) -> Model:
    path.mkdir()
    save_tiny(HYBRIDS[name](), path)
    return load_model(resolve(str(path)), device=CPU, dtype=torch.float32, ops=ops, impl="kvferry")


def runner_of(model: Model) -> Runner:
    kv = torch.zeros(64, *model.info.layout(model.dtype, BLOCK).block_shape, dtype=model.dtype)
    floats = model.info.state_floats
    return Runner(model, kv, BLOCK, states=StateMemory(make_rows(ROWS * 9 + 60, floats, CPU), kv) if floats else None)


@pytest.mark.parametrize("small", ["lfm2", "qwen3.5", "granite4", "falcon-h1", "jamba-dense"])
@pytest.mark.usefixtures("alone")
def test_tokens_with_a_recurrent_draft_model_are_those_without(small: str, ops: Ops, tmp_path: Path) -> None:
    model = load(tmp_path / "target", "lfm2", ops)
    draft = DraftModel(
        runner_of(load(tmp_path / "small", small, ops)), BlockPool(64, Ledger(64)), 12, WORDS, CoreTurns()
    )
    found = []
    for drafts_by in (None, draft):
        config = EngineConfig("f" * 32, BLOCK, 128, Limits(24, 12, 8), drafts=4 if drafts_by else 0)
        engine = Engine(config, runner_of(model), BlockPool(64, Ledger(64)), drafts_by)
        found.append(texts(engine))
    assert found[0] == found[1]
    drafted = sum(event.drafted for event in engine.events if hasattr(event, "drafted"))
    assert drafted > 0
    assert (small != "lfm2") or figures(engine)[2] == figures(engine)[1], "the same model draws the same tokens"
    assert left_nothing(engine)
