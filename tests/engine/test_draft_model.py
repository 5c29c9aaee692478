"""A draft model changes how many steps a text takes, and nothing else; it leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine import draft_model, drafter
from kvferry.engine.batch_planner import BatchPlanner, build_plan
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.budget import Limits
from kvferry.engine.draft_model import DraftModel
from kvferry.engine.engine import Engine, EngineConfig
from kvferry.engine.events import Generated
from kvferry.engine.grammar_masks import GrammarMasks
from kvferry.engine.ledger import Ledger
from kvferry.engine.models.base import ModelInfo
from kvferry.engine.ngram_drafts import NgramDrafts
from kvferry.engine.runner import Runner
from kvferry.engine.shared_cores.core_turns import CoreTurns
from kvferry.engine.step_slices import Slice
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.input_staging import Staging
from kvferry.protocol.layout import blocks_for
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate
from kvferry.structured_output.compile_threads import Inline
from tests.engine.test_grammars import EOS, OUTPUTS, job_of
from tests.engine.test_speculation import figures, finish, prompt
from tests.guessing_toys import Guessing
from tests.listed_grammars import ListedCompiler
from tests.toy import FINGERPRINT, VOCAB, ToyModel, expected, make_job, tokens_of

BLOCK = 4


def make_draft(model: ToyModel, blocks: int = 64, chunk: int = 8, vocab: int = VOCAB) -> DraftModel:
    kv = torch.full((blocks, 1, 2, 1, BLOCK, 1), -1.0)
    return DraftModel(Runner(model, kv, BLOCK), BlockPool(blocks, Ledger(blocks)), chunk, vocab, CoreTurns())


def make_engine(
    draft: DraftModel | None, blocks: int = 64, most: int = 4, seqs: int = 8, masks: GrammarMasks | None = None
) -> Engine:
    kv = torch.full((blocks, 1, 2, 1, BLOCK, 1), -1.0)
    config = EngineConfig(FINGERPRINT, BLOCK, 256, Limits(16, 8, seqs), drafts=most)
    return Engine(config, Runner(ToyModel(), kv, BLOCK, masks), BlockPool(blocks, Ledger(blocks)), draft)


@pytest.fixture(autouse=True)
def always_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    eager(monkeypatch)


def eager(patch: pytest.MonkeyPatch) -> None:
    """Draft whatever it takes: with toy models seconds tell nothing."""
    patch.setattr(drafter, "best_counts", lambda streams, count, step, pass_: ([most for _, most in streams], 1.0))
    patch.setattr(drafter, "DEBT_S", 1e9)
    patch.setattr(
        "kvferry.engine.speculation.Speculation._counts",
        lambda self, drafts: [len(d.found) if d else 0 for d in drafts],
    )


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else drafts."""
    monkeypatch.setattr(NgramDrafts, "propose", lambda self, most: setattr(self, "found", ()))


def left_nothing(engine: Engine) -> bool:
    engine.check_integrity()
    draft = engine.draft_model
    return draft is not None and draft.pool.available == draft.pool.num_blocks and not draft._shadows


def test_right_drafts_save_steps_and_change_no_token() -> None:
    engine = make_engine(make_draft(Guessing()))
    engine.add(make_job("a", prompt(9), 41))
    assert finish(engine) <= 1 + 1 + 8 + 40 // 5 + 2
    assert tokens_of(engine, "a") == expected(prompt(9), 41)
    made, drafted, accepted = figures(engine)
    assert made == 40
    assert drafted == accepted > 25
    assert left_nothing(engine)


@pytest.mark.parametrize("period", [2, 3, 5])
def test_what_it_drew_wrongly_is_forgotten(period: int) -> None:
    engine = make_engine(make_draft(Guessing(lambda place: place % period != 0)), most=6)
    engine.add(make_job("a", prompt(10), 90))
    finish(engine)
    assert tokens_of(engine, "a") == expected(prompt(10), 90)
    _, drafted, accepted = figures(engine)
    assert accepted >= (period - 1) * (drafted // 6) - period
    assert left_nothing(engine)


def test_all_streams_are_drafted_in_one_pass_for_each_place() -> None:
    model = Guessing()
    engine = make_engine(make_draft(model), most=3)
    for name in "abcd":
        engine.add(make_job(name, prompt(6, ord(name)), 40))
    while not all(tokens_of(engine, name) for name in "abcd"):
        engine.step()
    for _ in range(6):
        engine.step()
    model.rows.clear()
    engine.step()
    assert len(model.rows) == 3
    assert model.rows[1:] == [4, 4], "a pass for each place, a row for each stream"
    finish(engine)
    assert left_nothing(engine)


def test_a_prompt_is_caught_up_in_chunks_beside_other_streams() -> None:
    model = Guessing()
    engine = make_engine(make_draft(model, chunk=8), most=3)
    engine.add(make_job("short", prompt(3), 200))
    while len(tokens_of(engine, "short")) < 10:
        engine.step()
    engine.add(make_job("long", prompt(90, 1), 60))
    finish(engine)
    assert max(model.rows) <= 8 + 2 * draft_model.MAX_CATCH_UP
    assert sum(rows > 2 * draft_model.MAX_CATCH_UP for rows in model.rows) >= 90 // 8
    assert tokens_of(engine, "long") == expected(prompt(90, 1), 60)
    assert tokens_of(engine, "short") == expected(prompt(3), 200)
    assert left_nothing(engine)


@pytest.mark.parametrize("period", [3, 50])
def test_kept_plans_are_those_made_anew(monkeypatch: pytest.MonkeyPatch, period: int) -> None:
    """Also where two tokens of a stream are rows of one step, of which the second attends to the first."""
    original, chained = BatchPlanner.plan, 0

    def plan(planner: BatchPlanner, slices: Sequence[Slice]) -> tuple[torch.Tensor, BatchPlan]:
        nonlocal chained
        token_ids, made = original(planner, slices)
        if not any(part.drafts for part in slices):
            fresh_ids, fresh = build_plan(slices, BLOCK, Staging(torch.device("cpu")))
            for one, other in ((token_ids, fresh_ids), (made.positions, fresh.positions), (made.slots, fresh.slots)):
                assert torch.equal(one, other)
            assert made.total_lens == fresh.total_lens
            for row, total in enumerate(made.total_lens):
                read = blocks_for(total, BLOCK)
                assert torch.equal(made.block_table[row, :read], fresh.block_table[row, :read])
            if slices[-1].decodes:
                assert made.chained is (len({part.request.key for part in slices}) < len(slices))
                chained += made.chained
        return token_ids, made

    monkeypatch.setattr(BatchPlanner, "plan", plan)
    engine = make_engine(make_draft(Guessing(lambda place: place % period != 0)), most=3)
    for number in range(3):
        engine.add(make_job(str(number), prompt(6 + number, number), 50))
    finish(engine)
    assert chained
    assert engine.stepper._speculation._drafter.model is not None, "a plan was wrong"  # type: ignore[union-attr]


def test_what_it_computed_is_found_again() -> None:
    model = Guessing()
    engine = make_engine(make_draft(model, chunk=64), most=3)
    engine.add(make_job("a", prompt(60), 20))
    finish(engine)
    again = [*prompt(60), *tokens_of(engine, "a")]
    model.rows.clear()
    engine.add(make_job("b", again, 20))
    finish(engine)
    assert max(model.rows) <= 2 * BLOCK
    assert tokens_of(engine, "b") == expected(again, 20)


@settings(max_examples=60, deadline=None)
@given(
    wrong=st.sets(st.integers(0, 11)),
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=5),
    blocks=st.integers(20, 60),
    own=st.integers(2, 60),
    most=st.integers(1, 12),
    cancelled=st.integers(0, 40),
)
def test_any_drafts_where_blocks_are_few_and_a_stream_is_cancelled(
    wrong: set[int], lengths: list[tuple[int, int]], blocks: int, own: int, most: int, cancelled: int
) -> None:
    """Pools so small that streams are preempted, and that shadows have no room."""
    with pytest.MonkeyPatch.context() as patch:
        eager(patch)
        engine = make_engine(make_draft(Guessing(lambda place: place % 12 not in wrong), own), blocks, most)
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
        assert tokens_of(engine, "gone") == expected(prompt(9, 77), 100)[: len(tokens_of(engine, "gone"))]
        assert left_nothing(engine)


def test_a_stream_that_is_dropped_leaves_nothing_before_the_next_step() -> None:
    engine = make_engine(make_draft(Guessing()))
    engine.add(make_job("a", prompt(9), 100))
    for _ in range(8):
        engine.step()
    assert engine.draft_model is not None
    assert engine.draft_model.pool.holds.num_held
    engine.cancel("a", 0)
    assert left_nothing(engine)


def test_a_preempted_stream_is_drafted_again() -> None:
    engine = make_engine(make_draft(Guessing()), blocks=24)
    for number in range(4):
        engine.add(make_job(str(number), prompt(9, number), 60))
    finish(engine)
    assert engine.scheduler.preempted_total
    for number in range(4):
        assert tokens_of(engine, str(number)) == expected(prompt(9, number), 60)
    assert left_nothing(engine)


PARAMS: dict[str, dict[str, object]] = {
    "a seed": {"temperature": 1.3, "seed": 5},
    "top_p": {"temperature": 2.0, "top_p": 0.9, "top_k": 40, "seed": 9},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": tuple(range(0, VOCAB, 3))},
    "allowed": {"allowed_token_ids": (1, 2, 3, 4)},
    "log-probabilities": {"logprobs": 3},
    "frequency": {"frequency_penalty": 1.0, "presence_penalty": 0.5},
}


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.usefixtures("alone")
def test_whatever_is_drawn_is_drawn_alike(name: str) -> None:
    params = SamplingParams(**{"max_tokens": 60, "temperature": 0.0, **PARAMS[name]})  # type: ignore[arg-type]
    told = []
    for draft in (None, make_draft(Guessing())):
        engine = make_engine(draft, most=5 if draft else 0)
        engine.add(Job("a", 0, (1, 2, 3, 1, 2), 5, Generate(params), "router"))
        engine.add(make_job("plain", prompt(9), 30))
        finish(engine)
        assert tokens_of(engine, "plain") == expected(prompt(9), 30)
        news = [event.delta for event in engine.events if isinstance(event, Generated) and event.key[0] == "a"]
        told.append([(delta.token_ids, delta.logprobs, delta.finish_reason) for delta in news])
    assert told[0] == told[1]
    _, drafted, accepted = figures(engine)
    assert drafted == accepted, "the same model with the same noise draws the same tokens"


def test_a_stream_with_a_grammar_goes_without_beside_one_that_is_drafted() -> None:
    told = []
    for draft in (None, make_draft(Guessing())):
        masks = GrammarMasks(ListedCompiler(EOS), VOCAB, Inline(), Inline())
        engine = make_engine(draft, most=4 if draft else 0, masks=masks)
        engine.add(job_of("bound", [1, 2, 3]))
        engine.add(make_job("free", prompt(9), 40))
        finish(engine)
        assert tokens_of(engine, "free") == expected(prompt(9), 40)
        told.append(tokens_of(engine, "bound"))
    assert told[0] == told[1]
    assert told[0][:-1] in OUTPUTS
    assert figures(engine)[2] > 20


def test_tokens_that_it_does_not_know_are_not_given_to_it() -> None:
    """Vocabularies are padded to different sizes: what the draft model draws beyond the other's is no draft."""
    small = Guessing()
    small.info = ModelInfo("toy", "toy", 1, 1, 1, 50, 512)
    engine = make_engine(make_draft(small))
    engine.add(make_job("a", [60, 1, 2], 30))
    finish(engine)
    assert not small.rows
    engine = make_engine(make_draft(Guessing(), vocab=40))
    engine.add(make_job("a", [6, 1, 2], 60))
    finish(engine)
    assert tokens_of(engine, "a") == expected([6, 1, 2], 60)
    assert left_nothing(engine)


@pytest.mark.usefixtures("alone")
def test_a_sequence_longer_than_it_takes_goes_on_without() -> None:
    short = Guessing()
    short.info = ModelInfo("toy", "toy", 1, 1, 1, VOCAB, 40)
    draft = make_draft(short)
    engine, turns, computing = make_engine(draft), [], draft._core_turns.computing
    draft._core_turns.computing = lambda *args, **named: turns.append(1) or computing(*args, **named)  # type: ignore[method-assign, assignment, func-returns-value]
    engine.add(make_job("a", prompt(10), 90))
    finish(engine)
    assert tokens_of(engine, "a") == expected(prompt(10), 90)
    _, drafted, _ = figures(engine)
    assert 0 < drafted <= 30
    assert 0 < len(turns) <= len(short.rows), "it takes no cores for nothing"


def test_a_draft_model_that_fails_is_not_asked_again() -> None:
    class Failing(Guessing):
        def forward(self, *args: object, **named: object) -> torch.Tensor:  # type: ignore[override]
            if len(self.rows) == 5:
                raise RuntimeError("out of memory")
            return super().forward(*args, **named)  # type: ignore[arg-type]

    model = Failing()
    engine = make_engine(make_draft(model))
    engine.add(make_job("a", prompt(10), 60))
    finish(engine)
    assert tokens_of(engine, "a") == expected(prompt(10), 60)
    assert len(model.rows) == 5
    assert left_nothing(engine)
