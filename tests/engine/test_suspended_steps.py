"""A step of prompts that is suspended between two layers for what comes before it, and goes on there."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from kvferry.engine import suspended_steps
from kvferry.engine.engine import Engine
from kvferry.engine.models import load_model
from kvferry.engine.models.base import ForwardAbandoned, KeepGoing, SuspendedPass
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.suspended_steps import DEEPEST
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.decoder_step import always
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.source import resolve
from kvferry.protocol.messages import Job
from tests.engine.tiny_models import OURS, Cache, save_tiny, tokens_for
from tests.toy import ToyModel, expected, finish, make_engine, make_job, tokens_of

LAYERS = 4
LONG = list(range(1, 15))
"""A prompt that nearly fills a step."""


class Layered(ToyModel):
    """A toy model of several layers, each of which computes nothing; `between` is called between them. `passes` are the
    layers of each pass: where it began, where it ended, and of how many tokens."""

    resumable = True

    def __init__(self) -> None:
        self.between: Callable[[int], None] = lambda layer: None
        self.passes: list[tuple[int, int, int]] = []

    def forward(
        self,
        token_ids: torch.Tensor,
        kv: torch.Tensor,
        plan: BatchPlan,
        keep_going: KeepGoing = always,
        halfway: SuspendedPass | None = None,
    ) -> torch.Tensor:
        first = halfway.layer if halfway else 0
        x = halfway.x if halfway else token_ids.float()
        assert x.tolist() == token_ids.tolist(), "rows of other tokens"
        for layer in range(first + 1, LAYERS):
            if plan.num_tokens != plan.num_seqs:
                self.between(layer)
                if not keep_going():
                    self.passes.append((first, layer, plan.num_tokens))
                    raise ForwardAbandoned(SuspendedPass(layer, x, x))
        self.passes.append((first, LAYERS, plan.num_tokens))
        return super().forward(x.long(), kv, plan)


class Called:
    """An engine that is called in the middle of its steps: `at` are the layers before which commands come."""

    def __init__(self, **limits: int) -> None:
        self.engine = make_engine(**limits)  # type: ignore[arg-type]
        self.model = self.engine.runner.model = Layered()
        self.model.between = self._between
        self.engine.stepper.suspended.called = lambda: self._called
        self.at: dict[int, Callable[[Engine], None]] = {}
        self._called = False
        self._calls: list[Callable[[Engine], None]] = []

    def step(self) -> bool:
        """A turn of the loop."""
        self._called = False
        for call in self._calls:
            call(self.engine)
        self._calls.clear()
        return self.engine.step()

    def finish(self) -> None:
        while self.engine.has_work() or self._calls:
            assert self.step()
        self.engine.check_integrity()
        assert not self.engine.stepper.suspended

    def _between(self, layer: int) -> None:
        if layer in self.at:
            self._called = True
            self._calls.append(self.at.pop(layer))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspended_steps, "MIN_S", 0.0)


def newcomer(name: str = "short", tokens: tuple[int, ...] = (7, 8, 9)) -> Job:
    return replace(make_job(name, list(tokens), max_tokens=3), newcomer=True)


@pytest.mark.parametrize("job", [newcomer(), make_job("short", [7, 8, 9], 3)], ids=["a newcomer's", "a shorter one"])
def test_a_prompt_that_comes_first_is_computed_in_the_middle_of_another(job: Job) -> None:
    called, prompt = Called(), [*LONG, *LONG, *LONG]
    called.engine.add(make_job("long", prompt))
    called.at[2] = lambda engine: engine.add(job)
    called.step()
    assert called.engine.stepper.suspended
    called.step()
    assert tokens_of(called.engine, "short") == expected([7, 8, 9], 1)
    assert tokens_of(called.engine, "long") == []
    called.step()
    assert called.model.passes == [(0, 2, 16), (0, LAYERS, 3), (2, LAYERS, 16)]
    called.finish()
    assert tokens_of(called.engine, "long") == expected(prompt, 8)
    assert tokens_of(called.engine, "short") == expected([7, 8, 9], 3)


def test_what_comes_behind_it_waits_for_its_end() -> None:
    called = Called()
    called.engine.add(make_job("long", LONG))
    called.at[1] = lambda engine: engine.add(make_job("behind", [5, *LONG]))
    called.step()
    called.step()
    assert called.model.passes == [(0, 1, len(LONG)), (1, LAYERS, len(LONG))]
    called.finish()
    assert tokens_of(called.engine, "behind") == expected([5, *LONG], 8)


def test_who_leaves_meanwhile_is_left_out_and_its_blocks_are_others() -> None:
    called = Called(num_blocks=8, budget=32)
    prompts = {name: [number + 1] * 7 for number, name in enumerate("abc")}
    for name, prompt in prompts.items():
        called.engine.add(make_job(name, prompt, 2))

    def leave(engine: Engine) -> None:
        engine.cancel("b", 0)
        engine.add(newcomer(tokens=(9, 9, 9, 9, 9, 9)))

    called.at[3] = leave
    called.step()
    called.step()
    called.step()
    assert called.model.passes == [(0, 3, 21), (0, LAYERS, 6), (3, LAYERS, 14)]
    called.finish()
    assert {name: tokens_of(called.engine, name) for name in "ac"} == {n: expected(prompts[n], 2) for n in "ac"}
    assert tokens_of(called.engine, "b") == []


def test_nothing_is_left_of_a_step_whose_requests_all_left() -> None:
    called = Called()
    called.engine.add(make_job("long", LONG))
    called.at[2] = lambda engine: engine.cancel("long", 0)
    called.step()
    called.step()
    assert called.model.passes == [(0, 2, len(LONG))]
    assert called.engine.pool.free_blocks == called.engine.pool.num_blocks


def test_who_lost_its_blocks_begins_anew_in_others() -> None:
    called = Called()
    called.engine.add(make_job("long", LONG))

    called.at[3] = lambda engine: engine.scheduler.preempt(engine.request_table.running[0])
    called.step()
    called.finish()
    assert called.model.passes[:2] == [(0, 3, len(LONG)), (0, LAYERS, len(LONG))]
    assert tokens_of(called.engine, "long") == expected(LONG, 8)


def test_suspended_steps_go_on_in_order_of_their_places_and_are_few() -> None:
    called = Called(num_blocks=256, budget=64, seqs=32)
    lengths = [64 - 2 * number for number in range(DEEPEST + 2)]

    def come(number: int) -> Callable[[Engine], None]:
        def call(engine: Engine) -> None:
            engine.add(replace(make_job(f"r{number}", [number + 1] * lengths[number], 2), failures=number))
            if number + 1 < len(lengths):
                called.at[1] = come(number + 1)

        return call

    come(0)(called.engine)
    called.finish()
    deepest = lengths[DEEPEST]
    assert called.model.passes[: DEEPEST + 1] == [*((0, 1, n) for n in lengths[:DEEPEST]), (0, LAYERS, deepest)]
    assert [ended for _, ended, tokens in called.model.passes if tokens > len(lengths)].count(1) == DEEPEST
    for number, length in enumerate(lengths):
        assert tokens_of(called.engine, f"r{number}") == expected([number + 1] * length, 2)


def test_streams_never_wait_in_the_middle_of_a_step() -> None:
    called = Called()
    called.engine.add(make_job("stream", [1, 2, 3], 20))
    called.step()
    called.engine.add(make_job("long", LONG))
    called.at[2] = lambda engine: engine.add(newcomer())
    called.step()
    assert called.model.passes[-1][:2] == (0, LAYERS)
    called.finish()


def test_a_step_that_has_just_begun_is_not_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspended_steps, "MIN_S", 60.0)
    called = Called()
    called.engine.add(make_job("long", LONG))
    called.at[2] = lambda engine: engine.add(newcomer())
    called.step()
    assert called.model.passes == [(0, LAYERS, len(LONG))]


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_changed_by_it_whatever_comes_in_the_middle(seed: int) -> None:
    source = random.Random(seed)
    called = Called(num_blocks=24, budget=16, seqs=6)
    prompts: dict[str, list[int]] = {}
    cancelled: set[str] = set()

    def come(engine: Engine) -> None:
        if prompts and source.random() < 0.3:
            name = source.choice(list(prompts))
            cancelled.add(name)
            engine.cancel(name, 0)
        if len(prompts) < 20:
            name, prompt = f"r{len(prompts)}", source.choices(range(4), k=source.randint(1, 30))
            prompts[name] = prompt
            engine.add(replace(make_job(name, prompt, 4), newcomer=source.random() < 0.4))
        called.at[source.randint(1, LAYERS)] = come
        engine.check_integrity() if not engine.has_work() else None

    come(called.engine)
    while len(prompts) < 20:
        if not called.engine.has_work():
            come(called.engine)
        called.step()
    called.at.clear()
    called.finish()
    assert any(begun for begun, _, _ in called.model.passes)
    for name, prompt in prompts.items():
        keep_going = expected(prompt, 4)
        found = tokens_of(called.engine, name)
        assert found == keep_going or (name in cancelled and found == keep_going[: len(found)]), name


def test_a_call_that_breaks_the_step_which_goes_on_fails_nobody() -> None:
    """It is tried again from the beginning."""
    called = Called()
    called.engine.add(make_job("long", LONG))
    called.at[2] = lambda engine: engine.add(newcomer())
    called.step()
    called.step()
    run, left = called.engine.runner.run, [1]

    def once(*arguments: object) -> object:
        if left:
            left.pop()
            raise torch.OutOfMemoryError("a moment")
        return run(*arguments)  # type: ignore[arg-type]

    called.engine.runner.run = once  # type: ignore[method-assign, assignment]
    finish(called.engine)
    assert tokens_of(called.engine, "long") == expected(LONG, 8)
    assert (0, LAYERS, len(LONG)) in called.model.passes


@pytest.mark.parametrize(
    "name", ["llama2", "gemma3", "gemma3n", "gemma4", "olmo3", "cohere2", "gpt-oss", "deepseek-v3"]
)
def test_a_decoder_goes_on_exactly_where_it_was(name: str, tmp_path: Path) -> None:
    """Of two sequences, and of one of them; others are computed meanwhile."""
    save_tiny(OURS[name](), tmp_path)
    model = load_model(resolve(str(tmp_path)), device=torch.device("cpu"), dtype=torch.float32, ops=ReferenceOps())
    assert isinstance(model, Decoder)
    prompts = {"a": tokens_for(20), "b": tokens_for(14, 2)}
    rows = {"a": range(20), "b": range(20, 34)}
    whole = dict(zip("ab", Cache(model).step(prompts), strict=True))
    for layer, names in product(range(1, model.config.num_layers), ("ab", "a", "b")):
        cache, answers = Cache(model), iter([True] * (layer - 1) + [False])
        with pytest.raises(ForwardAbandoned) as raised:
            cache.step(prompts, lambda answers=answers: next(answers))  # type: ignore[misc]
        assert raised.value.halfway is not None
        assert raised.value.halfway.layer == layer
        cache.computed.clear()
        cache.step({"other": tokens_for(9, 3)})
        kept = raised.value.halfway.of([row for name in names for row in rows[name]])
        for name, found in zip(names, cache.step({n: prompts[n] for n in names}, halfway=kept), strict=True):
            torch.testing.assert_close(found, whole[name], rtol=1e-5, atol=1e-5)
