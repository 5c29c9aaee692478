"""Who makes a mask: grammar threads at first, the engine thread once they were quick, grammar threads again if not."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvferry.engine import grammar_mask as one_mask
from kvferry.engine import grammar_masks as all_masks
from kvferry.engine.grammar_mask import GrammarMask
from kvferry.engine.grammar_masks import GrammarMasks
from kvferry.protocol.errors import GrammarFailed
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Grammar
from kvferry.structured_output.compile_threads import CompileThreads
from tests.listed_grammars import ListedCompiler, ListedMatcher, listed
from tests.toy import VOCAB
from tests.waiting import wait_for

EOS = 2
OUTPUT = list(range(30, 50))
GRAMMAR = listed(OUTPUT)
PARAMS = SamplingParams(max_tokens=100, eos_token_ids=(EOS,))


@pytest.fixture
def makers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that made masks."""
    names: list[str] = []
    made = ListedMatcher.mask

    def mask(self: ListedMatcher, bits: np.ndarray) -> None:
        names.append(threading.current_thread().name)
        made(self, bits)

    monkeypatch.setattr(ListedMatcher, "mask", mask)
    return names


class Output:
    """One output and its mask, drawn from step by step."""

    def __init__(self, grammar: Grammar = GRAMMAR, params: SamplingParams = PARAMS, *, closes: bool = False) -> None:
        compiler = ListedCompiler(EOS)
        compiler.closes = closes
        self.masks = GrammarMasks(compiler, VOCAB, CompileThreads("compile"), CompileThreads("grammar"))
        self.tokens = [1]
        done: list[object] = []
        self.mask = self.masks.open(grammar, params, self.tokens, 1, done.append)
        wait_for(lambda: done == [None])

    def draw(self) -> int:
        """The first token that is allowed; the next mask is begun."""
        wait_for(self._settled)
        assert self.mask.error is None
        token = next(iter(sorted(allowed(self.mask))))
        self.tokens.append(token)
        self.masks.advance([self.mask])
        return token

    def _settled(self) -> bool:
        self.masks.settle([self.mask])
        return self.mask.ready


def allowed(mask: GrammarMask) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.bits.view(np.uint8), bitorder="little")).tolist())


def drawn(output: Output, count: int) -> list[int]:
    return [output.draw() for _ in range(count)]


def test_quick_masks_are_made_by_the_engine_thread_after_some_trials(makers: list[str]) -> None:
    output = Output()
    assert drawn(output, 21) == [*OUTPUT, EOS]
    assert makers[: one_mask.TRIALS] == ["compile", *["grammar"] * (one_mask.TRIALS - 1)]
    assert makers[one_mask.TRIALS :] == ["MainThread"] * (21 - one_mask.TRIALS)


def test_after_a_slow_mask_grammar_threads_make_some(makers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_masks, "TRIALS_IF_SLOW", 5)
    output = Output()
    drawn(output, 8)
    with monkeypatch.context() as patch:
        patch.setattr(all_masks, "SLOW_S", -1.0)
        output.masks.settle([output.mask])
    assert drawn(output, 1) == OUTPUT[8:9]
    assert not output.mask.deferred
    assert drawn(output, 12) == [*OUTPUT[9:], EOS]
    assert makers[8:15] == ["MainThread", *["grammar"] * 5, "MainThread"]


@pytest.mark.parametrize("bound", ["SLOW_S", "SELF_MADE_S"])
def test_a_step_makes_masks_itself_for_a_bounded_time(
    makers: list[str], monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """Behind one that is slow, or many that are not, grammar threads make the rest."""
    outputs = [Output() for _ in range(4)]
    for output in outputs:
        output.masks = outputs[0].masks
        drawn(output, 6)
    begun = len(makers)
    with monkeypatch.context() as patch:
        patch.setattr(all_masks, bound, -1.0)
        outputs[0].masks.settle([output.mask for output in outputs])
    wait_for(lambda: all(output.mask.ready for output in outputs))
    assert makers[begun:] == ["MainThread", *["grammar"] * 3]
    assert [drawn(output, 15) for output in outputs] == [[*OUTPUT[6:], EOS]] * 4


def test_a_slow_mask_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_masks, "SLOW_S", -1.0)
    output = Output()
    drawn(output, 3)
    assert output.mask.blocks or output.mask.ready
    wait_for(lambda: output.mask.ready)  # no thread makes masks beyond its test


def test_a_look_for_the_way_out_is_never_the_engine_threads(makers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ListedMatcher, "closes_at", 90)
    output = Output()
    assert drawn(output, 21) == [*OUTPUT, EOS]
    by_engine = range(one_mask.TRIALS, 10)
    assert [i for i, name in enumerate(makers) if name == "MainThread"] == list(by_engine)


def test_tokens_taken_back_or_given_before_an_owed_mask_is_made(makers: list[str]) -> None:
    output = Output()
    drawn(output, 8)
    del output.tokens[-2:]
    output.masks.advance([output.mask])
    assert output.draw() == OUTPUT[6]
    output.tokens.append(OUTPUT[7])
    output.masks.advance([output.mask])
    assert drawn(output, 13) == [*OUTPUT[8:], EOS]
    assert makers.count("MainThread") > 12


def test_what_goes_wrong_in_an_owed_mask_is_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    output = Output()
    drawn(output, 8)

    def broken(*_: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(ListedMatcher, "mask", broken)
    output.masks.settle([output.mask])
    assert output.mask.ready
    assert isinstance(output.mask.error, GrammarFailed)
    assert not output.mask.blocks


@pytest.mark.parametrize(
    ("params", "ends"),
    [
        (PARAMS, {EOS, 50, 51}),
        (replace(PARAMS, min_tokens=9), {51}),
        (replace(PARAMS, min_tokens=9, stop_token_ids=(50, 9999, -1)), {51}),
        (replace(PARAMS, min_tokens=9, stop_token_ids=(50, 51)), {EOS, 50, 51}),
        (replace(PARAMS, ignore_eos=True), {50, 51}),
    ],
)
def test_what_ends_a_request_is_spared_while_anything_else_is_allowed(params: SamplingParams, ends: set[int]) -> None:
    params = replace(params, stop_token_ids=(50, *params.stop_token_ids) if params.min_tokens else ())
    output = Output(listed([7], [7, 50], [7, 51]), params)
    assert output.draw() == 7
    wait_for(lambda: output.mask.ready)
    assert allowed(output.mask) == ends


def second_mask(grammar: Grammar, params: SamplingParams) -> GrammarMask:
    """Behind token 7, of a compiler that closes outputs."""
    output = Output(grammar, params, closes=True)
    assert output.draw() == 7
    wait_for(lambda: output.mask.ready)
    return output.mask


@pytest.mark.parametrize(
    "asked",
    [
        {"bad_words": ((50,),)},
        {"bad_words": ((7, 50),)},
        {"allowed_token_ids": (7, 51, 52, 53)},
        {"logit_bias": ((50, -100.0),)},
        {"ignore_eos": True},
        {"min_tokens": 3},
    ],
)
def test_nothing_is_forced_on_a_request_that_bans_tokens_or_wants_more(asked: dict[str, Any]) -> None:
    """The token that closes might be one that it bans; its output is cut."""
    grammar, params = listed([7, 50], [7, 51, 52, 53]), replace(PARAMS, max_tokens=3)
    for closed in (True, False):
        mask = second_mask(grammar, params if closed else replace(params, **asked))
        assert allowed(mask) == ({50} if closed else {50, 51})
        assert mask.closing == closed


def test_what_is_forced_waits_for_min_tokens() -> None:
    output = Output(listed([7, 8, 50], [7, 8, 51, 52, 53]), replace(PARAMS, max_tokens=4, min_tokens=2), closes=True)
    assert drawn(output, 2) == [7, 8]
    wait_for(lambda: output.mask.ready)
    assert allowed(output.mask) == {50}
