"""/tokenize and /detokenize in llama.cpp's shapes, and the fingerprint of answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.router.dispatch.interface import ClusterInfo
from tests.api_parts import Api, FakeCluster, demo_text, error_of, events, ids_of, says

TEXT = "Straße 媽 and emoji 🤗 12<|im_end|>"


async def test_content_is_tokenized_as_llama_cpp_does() -> None:
    api = Api(FakeCluster(says("x")))
    found = (await api.http.post("/tokenize", json={"content": TEXT})).json()
    assert (found["tokens"], found["count"]) == (ids_of(TEXT), len(ids_of(TEXT)))
    assert (await api.http.post("/tokenize", json={"content": "", "add_special": True})).json()["tokens"] == []
    text = (await api.http.post("/detokenize", json={"tokens": found["tokens"]})).json()
    assert text == {"prompt": TEXT, "content": TEXT}


async def test_pieces_are_texts_or_bytes_that_make_up_the_content() -> None:
    api = Api(FakeCluster(says("x")))
    for field in ("content", "prompt"):
        pieces = (await api.http.post("/tokenize", json={field: TEXT, "with_pieces": True})).json()["tokens"]
        assert [each["id"] for each in pieces] == ids_of(TEXT)
        assert {type(each["piece"]) for each in pieces} == {str, list}
        parts = [each["piece"].encode() if isinstance(each["piece"], str) else bytes(each["piece"]) for each in pieces]
        assert b"".join(parts).decode() == TEXT


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"content": "x", "prompt": "x"}, "prompt"),
        ({"content": "x", "parse_special": False}, "parse_special"),
        ({"content": 5}, "content"),
        ({"content": "x", "with_pieces": 1}, "with_pieces"),
    ],
)
async def test_what_cannot_be_tokenized_is_refused_by_name(body: dict[str, object], param: str) -> None:
    assert error_of(await Api(FakeCluster(says("x"))).http.post("/tokenize", json=body))["param"] == param


async def fingerprints(api: Api) -> set[str]:
    """Those of a chat, a completion and all chunks of a stream."""
    whole = [(await api.chat()).json(), (await api.http.post("/v1/completions", json={"prompt": "x"})).json()]
    chunks = events(await api.chat(stream=True, stream_options={"include_usage": True}))[:-1]
    return {each["system_fingerprint"] for each in (*whole, *chunks)}


async def test_answers_name_the_configuration_that_computed_them() -> None:
    text = demo_text()
    (first,) = await fingerprints(Api(FakeCluster(says("Hi there"))))
    assert first.startswith("fp_")
    assert await fingerprints(Api(FakeCluster(says("Bye")))) == {first}
    (others,) = await fingerprints(Api(FakeCluster(says("x")), replace(text, tool_call_parser="none")))
    cluster = FakeCluster(says("x"))
    cluster.info = lambda: ClusterInfo("demo", 4096, ("int8",))  # type: ignore[method-assign]
    (nodes,) = await fingerprints(Api(cluster))
    assert len({first, others, nodes}) == 3
