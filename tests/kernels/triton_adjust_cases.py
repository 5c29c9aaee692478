"""Additions and penalties by the Triton kernels equal those in PyTorch. Collected by test_triton_steps.py; on a GPU the
kernels run for real."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvferry.engine.sampler import SampleRow, sample
from kvferry.kernels.logit_adjustments import Adjusted, Adjustments
from kvferry.kernels.reference import ReferenceOps
from kvferry.kernels.triton import TritonOps
from kvferry.kernels.triton.logit_adjustments import Adjuster
from kvferry.protocol.sampling import SamplingParams
from tests.kernels.interpreted import DEVICE

VOCAB = 5000
PLACE = torch.device(DEVICE)
FORMS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "less than one": {"repetition_penalty": 0.6},
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": -0.9},
    "bias": {"logit_bias": ((3, 5.0), (4999, -7.5), (3, 0.25), *((100 + i, 0.5) for i in range(200)))},
    "min_tokens": {"min_tokens": 6, "max_tokens": 99, "eos_token_ids": (3, 17, VOCAB + 5), "stop_token_ids": (9,)},
    "all": {
        "repetition_penalty": 1.7,
        "frequency_penalty": -0.4,
        "presence_penalty": 0.3,
        "logit_bias": ((3, 5.0), (2, -100.0)),
        "min_tokens": 5,
        "max_tokens": 99,
        "eos_token_ids": (3, 1),
    },
}


class Request:
    """One that grows, and its adjustments by both ways."""

    def __init__(self, form: str, prompt: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.tokens = [self.random.randrange(VOCAB if i % 2 else 20) for i in range(prompt)]
        self.prompt = prompt
        params = SamplingParams(**FORMS[form])
        self.ours, self.plain = (Adjustments(params, self.tokens, prompt) for _ in range(2))

    def draw(self, count: int = 1) -> None:
        self.tokens += [self.random.randrange(20) for _ in range(count)]

    def row(self, at: int, adjustments: Adjustments, behind: int = -1) -> Adjusted:
        return Adjusted(at, adjustments, len(self.tokens) - self.prompt + (behind >= 0), behind)


def logits_of(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)).to(PLACE) * 4


def compare(adjuster: Adjuster, requests: list[Request], places: list[int], seed: int) -> None:
    logits = logits_of(max(places) + 2, seed)
    ours, plain = logits.clone(), logits.clone()
    adjuster(ours, [r.row(at, r.ours) for r, at in zip(requests, places, strict=True)])
    ReferenceOps().adjust(plain, [r.row(at, r.plain) for r, at in zip(requests, places, strict=True)])
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-6)
    untouched = [at for at in range(len(logits)) if at not in places]
    assert torch.equal(ours[untouched], logits[untouched])


@pytest.mark.parametrize("form", FORMS)
def test_each_form_changes_logits_as_in_pytorch(form: str) -> None:
    adjuster, request = Adjuster(PLACE, VOCAB), Request(form, 300, 1)
    for step, drawn in enumerate((0, 1, 1, 3, 1, 300, 1)):
        request.draw(drawn)
        compare(adjuster, [request], [0], step)


def test_rows_of_all_forms_come_and_go() -> None:
    """More than the table has at first, some at rows of their own, some that drew several tokens meanwhile."""
    adjuster, names = Adjuster(PLACE, VOCAB), [*FORMS, *FORMS]
    requests = [Request(name, 5 * i, i) for i, name in enumerate(names)]
    compare(adjuster, requests, [2 * i for i in range(len(requests))], 0)
    some = requests[::2]
    for request in requests:
        request.draw(2)
    compare(adjuster, some, [*range(len(some))][::-1], 1)
    compare(adjuster, requests, [*range(len(requests))], 2)


def test_counts_of_who_left_are_not_found_by_the_next() -> None:
    adjuster = Adjuster(PLACE, VOCAB)
    for seed in range(20):
        request = Request("all", 50, seed)
        compare(adjuster, [request], [0], seed)
        request.draw()
        compare(adjuster, [request], [0], seed)
        del request
        gc.collect()
    assert len(adjuster._counts) == 8


def test_a_step_that_failed_before_its_tokens_were_counted_is_taken_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    adjuster, request = Adjuster(PLACE, VOCAB), Request("all", 30, 2)
    request.draw(2)

    def fails(arrays: Any) -> Any:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(adjuster._staging, "put", fails)
        with pytest.raises(torch.OutOfMemoryError):
            adjuster(logits_of(1, 0), [request.row(0, request.ours)])
    compare(adjuster, [request], [0], 1)
    compare(adjuster, [request], [0], 2)


@pytest.mark.parametrize("ops", ["triton", "reference"])
@pytest.mark.parametrize("form", FORMS)
def test_the_token_that_the_host_does_not_know_counts_as_one_that_it_knows(form: str, ops: str) -> None:
    """Step after step, new ones and ones that were there, after a step that is taken anew, and one that drew none."""
    request, adjuster = Request(form, 40, 5), Adjuster(PLACE, VOCAB)
    adjust = adjuster if ops == "triton" else ReferenceOps().adjust
    for step, token in enumerate((7, 7, 4998, request.tokens[0], 7)):
        request.draw(0 if step else 1)
        drawn, logits = torch.tensor([5, 12, token], device=PLACE), logits_of(2, step)
        ours = [logits.clone() for _ in range(2 + (step == 2))]
        for each in ours[1:]:  # launched, and again as if that had failed
            adjust(each, [request.row(1, request.ours, 2)], drawn)
        if step == 3:  # given up: the host draws it once more
            adjust(ours[0], [request.row(1, request.ours)])
        request.tokens.append(token)
        plain = logits.clone()
        ReferenceOps().adjust(plain, [request.row(1, request.plain)])
        for each in ours[1:]:
            torch.testing.assert_close(each, plain, atol=1e-5, rtol=1e-6)
        if step == 3:
            adjust(again := logits.clone(), [request.row(1, request.ours)])
            torch.testing.assert_close(again, plain, atol=1e-5, rtol=1e-6)
    adjust(logits_of(2, 9), [request.row(1, request.ours, 0)], torch.tensor([-1], device=PLACE))
    compare(adjuster, [request], [0], 10)


def test_what_is_no_number_and_what_is_forbidden_stay_so() -> None:
    adjuster, request = Adjuster(PLACE, VOCAB), Request("all", 0, 3)
    request.tokens += [5, 6, 7, 8]
    ours = logits_of(1, 1)
    ours[0, 5], ours[0, 6], ours[0, 7] = torch.nan, -torch.inf, torch.inf
    plain = ours.clone()
    adjuster(ours, [request.row(0, request.ours)])
    ReferenceOps().adjust(plain, [request.row(0, request.plain)])
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-6, equal_nan=True)


def test_a_sampler_draws_the_same_tokens_whichever_row_of_the_table_adjusts() -> None:
    made = []
    for ops in (TritonOps(4), ReferenceOps()):
        params = [SamplingParams(**form, seed=i, temperature=0.8) for i, form in enumerate(FORMS.values())]
        params[0] = replace(params[0], allowed_token_ids=(*range(40, 80),), bad_words=((41,),))
        rows = [SampleRow(each, [1, 2, 3, 2], 3) for each in params]
        for step in range(6):
            for row, found in zip(rows, sample(logits_of(len(rows), step), rows, ops), strict=True):
                assert found is not None
                row.token_ids.append(found.token_id)  # type: ignore[attr-defined]
        made.append([[*row.token_ids] for row in rows])
    assert made[0] == made[1]
