"""On a clock of its own: a draft model is asked where tokens then take less time, and left alone where they do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from kvferry.engine import draft_model, drafter, step
from kvferry.engine.drafter import best_counts
from kvferry.engine.engine import Engine
from kvferry.engine.models.base import KeepGoing, SuspendedPass
from kvferry.engine.ngram_drafts import NgramDrafts
from kvferry.engine.shared_cores.core_turns import CoreTurns
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.decoder_step import always
from tests.engine.test_draft_model import make_draft, make_engine
from tests.engine.test_speculation import figures, prompt
from tests.guessing_toys import Guess
from tests.toy import VOCAB, ToyModel, make_job

STEP_S, ROW_S = 0.050, 0.002


class Clocked(ToyModel):
    """Takes as long as it is told to, by the clock that `now` reads; what it says depends on the last token alone, but
    behind those places that `right` denies. rows: of each pass."""

    now = 0.0

    def __init__(self, first: float, further: float, right: Guess = lambda place: True) -> None:
        self.first, self.further, self.right = first, further, right
        self.rows: list[int] = []

    def forward(
        self,
        token_ids: torch.Tensor,
        kv: torch.Tensor,
        plan: BatchPlan,
        keep_going: KeepGoing = always,
        halfway: SuspendedPass | None = None,
    ) -> torch.Tensor:
        self.rows.append(len(token_ids))
        Clocked.now += self.first + self.further * (len(token_ids) - 1)
        wrong = torch.tensor([not self.right(int(place) + 1) for place in plan.positions])
        return ((token_ids * 31 + plan.positions + wrong) % VOCAB)[:, None].float()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (step, draft_model, drafter):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: Clocked.now))
    monkeypatch.setattr(NgramDrafts, "propose", lambda self, most: setattr(self, "found", ()))


def engine_with(small: Clocked | None) -> Engine:
    engine = make_engine(make_draft(small, 400) if small else None, 400, most=5)
    engine.runner.model = Clocked(STEP_S, ROW_S)  # type: ignore[misc]
    return engine


def seconds(small: Clocked | None, streams: int, rounds: int, length: int = 9, count: int = 200) -> float:
    """Of that many streams at once, one round after the other."""
    engine = engine_with(small)
    Clocked.now = 0.0
    for number in range(rounds):
        for stream in range(streams):
            engine.add(make_job(f"{number}-{stream}", prompt(length, 7 * number + stream), count))
        while engine.has_work():
            engine.step()
    return Clocked.now


@pytest.mark.parametrize(("streams", "gain"), [(1, 3), (2, 2.5), (4, 1.7)])
def test_right_drafts_pay(streams: int, gain: float) -> None:
    """Steps of sixteen rows leave four streams three drafts each."""
    plain = seconds(None, streams, 10)
    assert plain / seconds(Clocked(0.005, 0.0002), streams, 10) > gain


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("first", [0.005, 0.040])
def test_wrong_drafts_cost_next_to_nothing(streams: int, first: float) -> None:
    plain = seconds(None, streams, 10)
    assert plain / seconds(Clocked(first, 0.0002, lambda place: place % 8 == 0), streams, 10) > 0.97


def test_a_draft_model_that_is_as_slow_as_the_model_is_hardly_asked() -> None:
    plain = seconds(None, 1, 10)
    assert plain / seconds(Clocked(STEP_S, ROW_S), 1, 10) > 0.97


def test_long_prompts_are_not_caught_up_for_a_few_tokens() -> None:
    plain = seconds(None, 1, 10, length=150, count=10)
    slow = Clocked(0.005, 0.010)
    assert plain / seconds(slow, 1, 10, length=150, count=10) > 0.97
    assert sum(slow.rows) < 10 * 150 / 2


def test_what_changes_for_the_better_is_noticed() -> None:
    right = False
    small = Clocked(0.005, 0.0002, lambda place: right)
    engine = engine_with(small)
    for number in range(20):
        right = number >= 10
        before = sum(figures(engine)[1:])
        engine.add(make_job(str(number), prompt(9, number), 200))
        while engine.has_work():
            engine.step()
    assert sum(figures(engine)[1:]) - before > 200


def test_so_many_drafts_are_worth_it() -> None:
    assert best_counts([(0.9, 8)], 1, (0.1, 0.01), (0.005, 0.001))[0] == [8]
    assert best_counts([(0.3, 8)], 1, (0.1, 0.01), (0.005, 0.001))[0][0] in (1, 2)
    assert best_counts([(0.3, 8)], 1, (0.1, 0.01), (0.05, 0.001)) == ([0], 0.0)
    counts, saved_s = best_counts([(0.9, 4), (0.05, 4), (0.9, 2)], 3, (0.1, 0.01), (0.005, 0.001))
    assert counts == [4, 0, 2]
    assert 0 < saved_s < 0.12 / 3


def test_waiting_for_shared_cores_is_no_cost_of_drafts() -> None:
    """What the neighbours compute meanwhile would be computed all the same."""

    class Crowded(CoreTurns):
        @contextmanager
        def computing(self, keep_going: KeepGoing, *, whole: bool = False, urgent: bool = False) -> Iterator[KeepGoing]:
            Clocked.now += 1.0
            self.waited_s = 1.0
            yield keep_going

    engine = engine_with(Clocked(0.005, 0.0002))
    assert engine.draft_model is not None
    engine.draft_model._core_turns = Crowded()
    engine.add(make_job("a", prompt(9), 200))
    while engine.has_work():
        engine.step()
    assert figures(engine)[1] > 100
