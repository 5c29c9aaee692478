"""What the demo model says in float32 by transformers itself, on English prompts of many lengths."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pydoc_data.topics import topics
from typing import Any

import torch

from kvferry.protocol.settings import RouterSettings
from kvferry.router.text.loader import load_text_model
from tests.once_a_run import once_a_run
from tests.transformers_demo import load_demo

NEW_TOKENS = 16
TIE = 1e-4
"""Logits this close may be decided either way."""
LENGTHS = [round(10 * 40 ** (i / 11)) for i in range(12)] + [700, 1200]


@dataclass(frozen=True)
class Answer:
    """Greedy continuation of a prompt; gaps[i]: distance of the two best logits where tokens[i] was chosen."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]

    def check(self, tokens: list[int] | tuple[int, ...], path: str) -> None:
        """Assert equality up to the first near tie, after which texts may part."""
        assert len(tokens) == len(self.tokens), (path, len(self.prompt), tokens)
        for i, (ours, theirs, gap) in enumerate(zip(tokens, self.tokens, self.gaps, strict=True)):
            if ours != theirs:
                assert gap < TIE, f"{path}: prompt of {len(self.prompt)}, token {i}: {ours} != {theirs}, gap {gap}"
                return


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """14 prompts of 10 to 1,200 tokens of English prose."""
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = load_text_model(RouterSettings()).encode(text[:400_000])
    rng = random.Random(0)
    starts = [rng.randrange(len(ids) - n) for n in LENGTHS]
    return tuple(tuple(ids[at : at + n]) for at, n in zip(starts, LENGTHS, strict=True))


@cache
def answers() -> tuple[Answer, ...]:
    """transformers' own greedy continuations, in float32."""

    def compute() -> list[Any]:
        model = load_demo()
        made = (answer_of(model, prompt) for prompt in prompts())
        return [[answer.prompt, answer.tokens, answer.gaps] for answer in made]

    return tuple(Answer(*map(tuple, each)) for each in once_a_run("greedy_by_transformers", compute))


@torch.inference_mode()
def answer_of(model: torch.nn.Module, prompt: tuple[int, ...]) -> Answer:
    """What `model` says after the prompt."""
    out = model(input_ids=torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    tokens, gaps = [], []
    for _ in range(NEW_TOKENS):
        best = out.logits[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        out = model(
            input_ids=torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1
        )
    return Answer(prompt, tuple(tokens), tuple(gaps))
