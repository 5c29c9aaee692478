from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from kvferry.router.text.template import ChatTemplate
from tests.api_parts import MESSAGES, Api, FakeCluster, demo_text, error_of, says, served

ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
BENT = {"messages": [{"role": "system", "content": "s"}, *MESSAGES]}
HEADER = "x-kvferry-template-adaptations"


@pytest.fixture
def api() -> Api:
    return Api(FakeCluster(says("Yes.")))


def alternating(**settings: Any) -> Api:
    text = replace(demo_text(), template=ChatTemplate(ALTERNATING, {}), strict_templates=bool(settings))
    return Api(FakeCluster(says("Yes.")), text)


async def test_a_chat_is_rendered_as_it_is_generated_from(api: Api) -> None:
    answer = await api.http.post(
        "/v1/chat/completions/render", json={"messages": MESSAGES, "temperature": 0.5, "seed": 3}
    )
    found = answer.json()
    assert found["prompt"] == demo_text().render(MESSAGES)
    assert (found["sampling_params"]["temperature"], found["sampling_params"]["seed"]) == (0.5, 3)
    assert not api.cluster.dispatches
    await api.chat(temperature=0.5, seed=3)
    spec = api.cluster.dispatches[-1].spec
    assert (tuple(found["token_ids"]), found["sampling_params"]["max_tokens"]) == (
        spec.token_ids,
        spec.params.max_tokens,
    )


async def test_texts_and_token_ids_are_rendered_one_by_one(api: Api) -> None:
    found = (await api.http.post("/v1/completions/render", json={"prompt": ["Once upon", "a"]})).json()
    assert [each["prompt"] for each in found] == ["Once upon", "a"]
    ids = found[0]["token_ids"]
    again = (await api.http.post("/v1/completions/render", json={"prompt": ids})).json()
    assert (again[0]["prompt"], again[0]["token_ids"]) == ("Once upon", ids)
    assert found[0]["request_id"] != found[1]["request_id"]


async def test_a_template_is_applied_as_by_llama_cpp(api: Api) -> None:
    answer = await api.http.post("/apply-template", json={"messages": MESSAGES})
    assert answer.json() == {"prompt": demo_text().render(MESSAGES)}


@pytest.mark.parametrize("path", ["/apply-template", "/v1/chat/completions/render"])
async def test_errors_name_the_field(api: Api, path: str) -> None:
    answer = await api.http.post(path, json={"messages": []})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "messages")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions/render", "/apply-template"])
async def test_adaptations_to_the_template_are_named_in_a_header(path: str) -> None:
    api = alternating()
    answer = await api.http.post(path, json=BENT)
    assert (answer.status_code, answer.headers[HEADER]) == (200, "system-in-user")
    assert HEADER not in (await api.http.post(path, json={"messages": MESSAGES})).headers


async def test_streams_and_other_apis_name_them_too() -> None:
    api = alternating()
    streamed = await api.http.post("/v1/chat/completions", json={**BENT, "stream": True})
    assert streamed.headers[HEADER] == "system-in-user"
    message = {"messages": MESSAGES, "system": "s", "max_tokens": 4}
    assert (await api.http.post("/v1/messages", json=message)).headers[HEADER] == "system-in-user"
    response = {"input": "a", "instructions": "s"}
    assert HEADER in (await api.http.post("/v1/responses", json=response)).headers


async def test_strict_templates_refuse_by_the_field() -> None:
    answer = await alternating(strict=True).http.post("/v1/chat/completions", json=BENT)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "messages")
    assert "alternate" in error_of(answer)["message"]


BARE: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": MESSAGES},
    "/completions": {"prompt": "a"},
    "/embeddings": {"input": "a"},
    "/responses": {"input": "a"},
    "/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/messages/count_tokens": {"messages": MESSAGES},
    "/chat/completions/render": {"messages": MESSAGES},
}


@pytest.mark.parametrize("path", BARE)
@pytest.mark.parametrize("root", ["", "/llm"])
async def test_paths_without_the_version_are_the_same_routes(path: str, root: str) -> None:
    api = Api(FakeCluster(says("Yes.")), root_path=root)
    answer, known = [await api.http.post(f"{root}{each}", json=BARE[path]) for each in (path, f"/v1{path}")]
    assert (answer.status_code, answer.json().keys()) == (200, known.json().keys())
    if path in ("/chat/completions", "/completions"):
        counted = api.sample("kvferry_requests_total", endpoint=f"/v1{path}", status="200")
        assert counted == 2


async def test_models_and_files_are_found_without_the_version(api: Api, tmp_path: Path) -> None:
    models = (await api.http.get("/v1/models")).json()
    assert (await api.http.get("/models")).json() == models
    assert (await api.http.get(f"/models/{models['data'][0]['id']}")).json() == models["data"][0]


async def test_a_key_is_asked_for_without_the_version_too() -> None:
    api = Api(FakeCluster(says("x")), api_key="k")
    for path, body in BARE.items():
        refused = await api.http.post(path, json=body)
        assert refused.status_code == 401
        known = await api.http.post(f"/v1{path}", json=body)
        assert known.json().keys() == refused.json().keys()
        assert (await api.http.post(path, json=body, headers={"authorization": "Bearer k"})).status_code == 200


@pytest.mark.parametrize("path", ["/completion", "/embedding", "/chat", "/modelsx", "/chat/completionsx"])
async def test_other_paths_stay_unknown(api: Api, path: str) -> None:
    assert (await api.http.post(path, json={})).status_code == 404


async def test_a_client_s_base_url_may_lack_the_version(api: Api) -> None:
    with served(api.app) as url:
        client = AsyncOpenAI(base_url=url, api_key="none")
        answer = await client.chat.completions.create(model="SmolLM2-135M-Instruct", messages=MESSAGES)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == "Yes."
        shown: Any = await client.post("/chat/completions/render", cast_to=object, body={"messages": MESSAGES})
        assert shown["token_ids"] == list(api.cluster.dispatches[-1].spec.token_ids)
        assert [each.id async for each in client.models.list()] == ["SmolLM2-135M-Instruct"]


async def test_routes_have_llama_cpp_s_other_names(api: Api) -> None:
    assert (await api.http.get("/v1/health")).json() == {"status": "ok"}
    for path in ("/reranking", "/v1/reranking"):
        refused = await api.http.post(path, json={"query": "a"})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "documents")
