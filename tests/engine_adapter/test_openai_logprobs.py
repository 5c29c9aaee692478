"""Log-probabilities of servers of the OpenAI API: each token has an entry, and each text the tokens that spell it."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.engine_adapter.engines.openai_logprobs import of_text, of_tokens, rows_of
from tests.engine_adapter.test_text_tokens import made

TOKENIZER, VOCABULARY = made("bytes")


def row(token: int, logprob: float, **top: float) -> dict[str, Any]:
    """An entry as llama.cpp sends it."""
    rivals = [{"id": int(name[1:]), "token": "", "logprob": value} for name, value in top.items()]
    return {"id": token, "token": "", "bytes": [], "logprob": logprob, "top_logprobs": rivals}


def ids(text: str) -> list[int]:
    return list(TOKENIZER.library.encode(text, add_special_tokens=False).ids)


def test_ids_of_the_server_are_taken_where_they_spell_the_text():
    told = rows_of({"content": [row(48, -1.0, _48=-1.0, _4093=-2.0), row(4093, -0.5, _5=-0.25, _4093=-0.5)]})
    tokens, entries = of_text("@user", ids("@user"), told, 1, VOCABULARY)
    assert tokens == (48, 4093)
    assert [(each.logprob, each.rank, each.top) for each in entries] == [(-1.0, 1, ((48, -1.0),)),
                                                                        (-0.5, 2, ((5, -0.25),))]  # fmt: skip


def test_the_last_token_of_a_character_does_not_stand_for_all_of_it():
    """llama.cpp sends ` 小`, three tokens, with the entry of the last one."""
    tokens, entries = of_text(" 小", ids(" 小"), rows_of({"content": [row(233, -0.5)]}), 1, VOCABULARY)
    assert tokens == (13223, 125, 233)
    assert [(each.token_id, each.logprob) for each in entries] == [(13223, -0.5), (125, 0.0), (233, 0.0)]


@pytest.mark.parametrize("name", ["bytes:\\xf0\\x9f", "\ufffd", "something else"])
def test_names_that_are_not_the_text_leave_its_tokens(name: str):
    told = rows_of({"tokens": [name], "token_logprobs": [-0.5], "top_logprobs": None})
    tokens, entries = of_text(" world", ids(" world"), told, 1, VOCABULARY)
    assert tokens == tuple(ids(" world"))
    assert [each.logprob for each in entries] == [-0.5] + [0.0] * (len(tokens) - 1)


def test_names_cut_the_text_as_the_server_did():
    told = rows_of({"tokens": [" wor", "ld"], "token_logprobs": [-0.5, None], "top_logprobs": [{" wor": -0.5}, None]})
    tokens, entries = of_text(" world", ids(" world"), told, 1, VOCABULARY)
    assert TOKENIZER.decode(list(tokens)) == " world"
    assert len(tokens) > len(ids(" world"))
    assert sum(each.logprob for each in entries) == -0.5


def test_tokens_named_by_their_ids_need_no_vocabulary():
    told = rows_of(
        {"tokens": ["token_id:7"], "token_logprobs": [-0.5], "top_logprobs": [{"token_id:9": -0.25, "x": -1}]}
    )
    (entry,) = of_tokens([7], told, 5, None)
    assert (entry.token_id, entry.rank, entry.top) == (7, 2, ((9, -0.25),))
    with pytest.raises(ValueError, match="shorter"):
        of_tokens([7, 8], told, 5, None)
