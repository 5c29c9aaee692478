"""Numbers and booleans of request bodies: each is refused in place of the other and as a string, as the schema says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.api.bodies.completions import CompletionBody
from kvferry.router.api.bodies.generating import ChatBody
from kvferry.router.api.bodies.reader import build
from kvferry.router.api.messages.body import CountBody, MessagesBody
from kvferry.router.api.pooling.embeddings import EmbeddingBody
from kvferry.router.api.pooling.scoring import ClassifyBody, RerankBody, ScoreBody
from kvferry.router.api.responses.body import ResponsesBody
from kvferry.router.api.tokenization import DetokenizeBody, TokenizeBody

SAID = [{"role": "user", "content": "a"}]
BODIES: dict[type[Any], dict[str, Any]] = {
    ChatBody: {"messages": SAID, "logprobs": True},
    CompletionBody: {"prompt": "a"},
    MessagesBody: {"messages": SAID, "max_tokens": 1},
    CountBody: {"messages": SAID},
    EmbeddingBody: {"input": "a"},
    ClassifyBody: {"input": "a"},
    ScoreBody: {"text_1": "a", "text_2": "b"},
    RerankBody: {"query": "a", "documents": ["b"]},
    ResponsesBody: {"input": "a"},
    TokenizeBody: {"prompt": "a"},
    DetokenizeBody: {"tokens": [1]},
}
WRONG = (True, 1, 1.5, "1", "true", [True], ["1"], {"1": True})


def wrong_fields() -> Iterator[Any]:
    for kind in BODIES:
        whole = kind.model_json_schema()
        for name, schema in whole["properties"].items():
            if any(f"'{scalar}'" in str(schema) for scalar in ("integer", "number", "boolean")):
                for value in WRONG:
                    allowed = jsonschema.Draft202012Validator({**schema, "$defs": whole.get("$defs", {})})
                    yield pytest.param(kind, name, value, allowed.is_valid(value), id=f"{kind.__name__}-{name}-{value}")


@pytest.mark.parametrize(("kind", "name", "value", "allowed"), wrong_fields())
def test_what_the_schema_refuses_is_refused(kind: type[Any], name: str, value: Any, allowed: bool) -> None:
    body = {**BODIES[kind], name: value}
    if allowed:
        build(kind, body)
    else:
        with pytest.raises(InvalidRequest) as refused:
            build(kind, body)
        assert (refused.value.param or "").startswith(name)


def test_a_whole_number_may_have_a_point() -> None:
    assert build(ChatBody, {"messages": SAID, "max_tokens": 5.0}).max_tokens == 5
