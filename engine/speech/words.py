"""Times of words: the decoder's attention to the audio, aligned by dynamic time warping (Radford et al. 2022)."""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from kvferry.engine.speech.segments import STEP_S, Word

FILTER = 7
"""Steps of audio over which the attention's median is taken."""
UNSPACED = frozenset(("zh", "ja", "th", "lo", "my", "yue"))
"""Languages written without spaces between words: each character counts as a word."""
_OPENING, _CLOSING = "\"'“¿([{-", "\"'.。,，!！?？:：”)]}、"


def word_times(scores: torch.Tensor, before: int, lengths: Sequence[int], steps: int) -> list[tuple[float, float]]:
    """Return begin and end of each word in seconds after the window's begin.

    scores: [head, token, position], not normalised, of the tokens before the text, the text and the end. before: tokens
    up to the text, less one: the last of these predicts the first token of the text. lengths: tokens of each word.
    steps: positions that hold audio."""
    weights = scores[:, :, :steps].softmax(-1)
    spread = weights.std(-2, keepdim=True, unbiased=False).clamp_(min=1e-9)
    weights = (weights - weights.mean(-2, keepdim=True)) / spread
    if steps > FILTER // 2:
        padded = F.pad(weights, (FILTER // 2, FILTER // 2), mode="reflect")
        weights = padded.unfold(-1, FILTER, 1).median(-1).values
    tokens, times = _aligned(-weights.mean(0)[before:-1].double().numpy())
    begins = times[np.diff(tokens, prepend=-1) > 0] * STEP_S
    bounds = np.minimum(np.cumsum([0, *lengths]), len(begins) - 1)
    return [(float(begins[a]), float(begins[b])) for a, b in itertools.pairwise(bounds)]


def split_words(tokenizer: Tokenizer, tokens: Sequence[int], language: str) -> list[tuple[str, int]]:
    """Return the words of a text's tokens, each with its number of tokens; punctuation belongs to its word."""
    pieces, pending = list[tuple[str, int]](), list[int]()
    for token in tokens:
        pending.append(token)
        text = tokenizer.decode(pending, skip_special_tokens=False)
        if "\ufffd" not in text:
            pieces.append((text, len(pending)))
            pending = []
    if pending:
        pieces.append((tokenizer.decode(pending, skip_special_tokens=False), len(pending)))
    words = list[tuple[str, int]]()
    for text, count in pieces:
        stripped = text.strip()
        opens = bool(words) and words[-1][0].strip() in _OPENING and words[-1][0].startswith(" ")
        closes = bool(stripped) and stripped in _CLOSING and not text.startswith(" ")
        joins = not text.startswith(" ") and language not in UNSPACED and stripped not in string.punctuation
        if words and (closes or joins or (opens and not text.startswith(" "))):
            words[-1] = (words[-1][0] + text, words[-1][1] + count)
        else:
            words.append((text, count))
    return words


def timed(words: Sequence[tuple[str, int]], times: Sequence[tuple[float, float]], offset: float) -> list[Word]:
    """Return words with their times, moved by the seconds before the window."""
    return [
        Word(text.strip(), round(offset + start, 2), round(offset + end, 2))
        for (text, _), (start, end) in zip(words, times, strict=True)
    ]


def _aligned(costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the cheapest monotonic path through costs [token, position], as tokens and positions.

    Costs are summed along diagonals, whose entries do not depend on each other."""
    rows, columns = costs.shape
    total = np.full((rows + 1, columns + 1), np.inf)
    moves = np.zeros((rows + 1, columns + 1), dtype=np.int8)
    total[0, 0] = 0.0
    moves[0, :], moves[:, 0] = 2, 1
    for diagonal in range(2, rows + columns + 1):
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        options = np.stack((total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]))
        chosen = np.where((options[0] < options[1]) & (options[0] < options[2]), 0, 2 - (options[1] < options[2]))
        total[i, j] = costs[i - 1, j - 1] + options[chosen, np.arange(len(i))]
        moves[i, j] = chosen
    path, at, to = list[tuple[int, int]](), rows, columns
    while at > 0 or to > 0:
        path.append((at - 1, to - 1))
        move = moves[at, to]
        at, to = at - (move != 2), to - (move != 1)
    tokens, times = np.array(path[::-1]).T
    return tokens, times
