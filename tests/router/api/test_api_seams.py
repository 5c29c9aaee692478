"""Where parts of the API that were made one by one meet."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api_parts import Api, FakeCluster, error_of, says

WRONG = {"type": "no type"}
FUNCTION = {"type": "function", "name": "f", "parameters": WRONG, "strict": True}


@pytest.fixture
def api() -> Api:
    return Api(FakeCluster(says("x")))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": WRONG, "strict": True}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 5}}}, "text.format.schema"),
        ({"text": {"format": {"type": "no type"}}}, "text.format.type"),
        ({"tools": [FUNCTION]}, "tools"),
        ({"tools": [FUNCTION], "tool_choice": "required"}, "tools"),
    ],
)
async def test_a_grammar_is_refused_under_the_name_that_responses_has_for_it(
    api: Api, body: dict[str, Any], param: str
) -> None:
    answer = await api.http.post("/v1/responses", json={"input": "x", **body})
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)
    assert error_of(answer)["message"].startswith(param)


async def test_a_grammar_is_refused_under_the_name_that_messages_has_for_it(api: Api) -> None:
    config = {"format": {"type": "json_schema", "schema": WRONG}}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "output_config": config}
    answer = await api.http.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("output_config.format: the grammar cannot be used")


@pytest.mark.parametrize("root", ["", "/llm"])
async def test_messages_tells_errors_in_its_own_words_below_any_root(root: str) -> None:
    http = Api(FakeCluster(says("x")), root_path=root).http
    for path in ("/v1/messages/count_tokens", f"{root}/v1/messages/count_tokens"):
        assert (await http.post(path, json={"messages": []})).json()["type"] == "error"
    assert (await http.get(f"{root}/v1/messages")).json()["type"] == "error"
    assert "type" not in (await http.get(f"{root}/v1/completions")).json()
