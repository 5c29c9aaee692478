"""Reader of log-probabilities in the several forms in which servers of the OpenAI API send them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.engine_adapter.text_tokens import TextVocabulary
from kvferry.protocol.messages import TokenLogprobs

_AS_ID = "token_id:"
"""How vLLM spells a token by its id."""


@dataclass(frozen=True, slots=True)
class Row:
    """One token's entry. token: its id if the server sends it, else its text. top: (token, log-probability)."""

    token: int | str
    logprob: float
    top: tuple[tuple[int | str, float], ...] = ()


def rows_of(reported: Any) -> list[Row]:
    """Return the entries of `choices[].logprobs`: parallel lists (completions) or objects (chat; llama.cpp)."""
    if not reported:
        return []
    if (content := reported.get("content")) is not None:
        return [
            Row(_name(each), _number(each["logprob"]),
                tuple((_name(top), _number(top["logprob"])) for top in each.get("top_logprobs") or ()))
            for each in content
        ]  # fmt: skip
    names, values = reported.get("tokens") or [], reported.get("token_logprobs") or []
    tops = reported.get("top_logprobs") or [None] * len(names)
    return [
        Row(_id(name), _number(value), tuple((_id(each), _number(found)) for each, found in (top or {}).items()))
        for name, value, top in zip(names, values, tops, strict=True)
    ]


def of_tokens(
    ids: Sequence[int], rows: Sequence[Row], most: int, vocabulary: TextVocabulary | None
) -> tuple[TokenLogprobs, ...]:
    """Return the entries of tokens whose ids are known. Raises ValueError if their numbers differ."""
    return tuple(_entry(token, row, most, vocabulary) for token, row in zip(ids, rows, strict=True))


def of_text(
    text: str, ids: Sequence[int], rows: Sequence[Row], most: int, vocabulary: TextVocabulary
) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
    """Return the tokens of a text and their entries, by the server's own cuts where its entries spell the text.

    ids: tokens of the text, at least one. They stay where the entries do not spell it; the first one then has the sum
    of the log-probabilities, and the others 0."""
    names = [row.token for row in rows if isinstance(row.token, str)]
    parts = [_parts(row.token, vocabulary) for row in rows] if not names or "".join(names) == text else []
    tokens = tuple(token for each in parts for token in each)
    if not vocabulary.spells(tokens, text.encode("utf-8", "replace")):
        whole = TokenLogprobs(ids[0], sum(row.logprob for row in rows), 1)
        return tuple(ids), (whole, *(TokenLogprobs(token, 0.0, 1) for token in ids[1:]))
    entries = [
        _entry(token, row if number == 0 else Row(token, 0.0), most, vocabulary)
        for row, each in zip(rows, parts, strict=True)
        for number, token in enumerate(each)
    ]
    return tokens, tuple(entries)


def _entry(token: int, row: Row, most: int, vocabulary: TextVocabulary | None) -> TokenLogprobs:
    likely = sorted(row.top, key=lambda each: -each[1])
    rank = next((at for at, each in enumerate(likely, start=1) if each[1] <= row.logprob), len(likely) + 1)
    named = ((_known(name, vocabulary), value) for name, value in likely[:most])
    return TokenLogprobs(token, row.logprob, rank, tuple((name, value) for name, value in named if name is not None))


def _parts(token: int | str, vocabulary: TextVocabulary) -> tuple[int, ...]:
    return (token,) if isinstance(token, int) else vocabulary.ids(token) if token else ()


def _known(token: int | str, vocabulary: TextVocabulary | None) -> int | None:
    if isinstance(token, int):
        return token
    return vocabulary.token(token) if vocabulary else None


def _name(reported: dict[str, Any]) -> int | str:
    found = reported.get("id")
    return found if isinstance(found, int) else _id(reported["token"])


def _id(name: str) -> int | str:
    return int(name[len(_AS_ID) :]) if name.startswith(_AS_ID) else name


def _number(value: Any) -> float:
    return float(value) if value is not None else 0.0
