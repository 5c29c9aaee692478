"""Verdicts on grammars that all checkers of one vocabulary in a test process share.

A checker starts a process that reads the vocabulary, which costs 0.7 s of CPU time, and most routers of tests ask it
for a grammar that another one has asked for. A verdict depends on the vocabulary and the grammar alone."""

from __future__ import annotations

from collections import OrderedDict

from kvferry.model_files.tokenizer import TextTokenizer
from kvferry.router.text.text_model import TextModel
from kvferry.structured_output.checker import Checker

Verdicts = OrderedDict[str, str | None]
_VERDICTS: dict[tuple[int, int, tuple[int, ...]], tuple[TextTokenizer, Verdicts]] = {}
"""By what makes a vocabulary. The tokenizer is kept, so that no other one gets its id."""


def share_verdicts(checker: Checker, text: TextModel) -> None:
    """Let this checker know what others have learnt of this model's vocabulary, and tell them what it learns."""
    vocabulary = id(text.tokenizer), text.facts.vocab_size, text.facts.eos_token_ids
    checker._known = _VERDICTS.setdefault(vocabulary, (text.tokenizer, checker._known))[1]
