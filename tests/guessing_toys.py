"""Toy models that draft: they say what the toy model says, except at places of a text that a test denies."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvferry.kernels.batch_plan import BatchPlan
from tests.recurrent_toy import RecurrentToy
from tests.toy import VOCAB, ToyModel

Guess = Callable[[int], bool]
"""Whether the token at a place of a text is right."""


def always_right(place: int) -> bool:
    return True


def guessed(hidden: torch.Tensor, plan: BatchPlan, right: Guess) -> torch.Tensor:
    """Return what a model says behind each token: the next value where `right` denies the place."""
    wrong = torch.tensor([not right(int(position) + 1) for position in plan.positions])
    return torch.where(wrong[:, None], (hidden + 1) % VOCAB, hidden)


class Guessing(ToyModel):
    """Drafts without states. rows: of each pass."""

    def __init__(self, right: Guess = always_right) -> None:
        self.right = right
        self.rows: list[int] = []

    def forward(
        self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan, *_: object, **__: object
    ) -> torch.Tensor:
        self.rows.append(len(token_ids))
        return guessed(super().forward(token_ids, kv, plan), plan, self.right)


class GuessingStates(RecurrentToy):
    """Drafts with recurrent states. rows: of each pass. faulty: tokens computed after a state that was not theirs."""

    def __init__(self, right: Guess = always_right) -> None:
        super().__init__()
        self.right, self.faulty = right, 0
        self.rows: list[int] = []

    def forward(
        self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan, *_: object, **__: object
    ) -> torch.Tensor:
        self.rows.append(len(token_ids))
        hidden = super().forward(token_ids, kv, plan)
        plain = super(RecurrentToy, self).forward(token_ids, kv, plan)
        self.faulty += int((hidden != plain % VOCAB).sum())
        return guessed(hidden, plan, self.right)
