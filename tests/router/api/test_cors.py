"""Pages of other origins, and a proxy that shows the server under a path."""

from __future__ import annotations

import pytest

from tests.api_parts import Api, FakeCluster, says

PAGE = "https://page.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


async def test_a_page_of_an_allowed_origin_may_ask() -> None:
    api = Api(FakeCluster(says("x")), allowed_origins=f"{PAGE}, https://other.example", api_key="key")
    allowed = await api.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    headers = {"origin": PAGE, "authorization": "Bearer key"}
    for body in ({}, {"stream": True}):
        answer = await api.http.post("/v1/completions", json={"prompt": "a", **body}, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    refused = await api.http.post("/v1/completions", json={"prompt": "a"}, headers={"origin": PAGE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)


async def test_a_page_of_another_origin_may_not() -> None:
    api = Api(FakeCluster(says("x")), allowed_origins="https://other.example")
    assert (await api.http.options("/v1/chat/completions", headers=PREFLIGHT)).status_code == 400
    answer = await api.http.post("/v1/completions", json={"prompt": "a"}, headers={"origin": PAGE})
    assert "access-control-allow-origin" not in answer.headers


async def test_without_the_setting_no_origin_is_named() -> None:
    api = Api(FakeCluster(says("x")))
    assert (await api.http.options("/v1/chat/completions", headers=PREFLIGHT)).status_code == 405
    answer = await api.http.get("/v1/models", headers={"origin": PAGE})
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("root", ["/llm", "llm/", "/deep/er"])
@pytest.mark.parametrize("stripped", [True, False])
async def test_a_proxy_s_path_is_in_front_of_all_whether_it_is_taken_away_or_not(root: str, stripped: bool) -> None:
    api = Api(FakeCluster(says("x")), root_path=root, api_key="key")
    shown = "/" + root.strip("/")
    front = "" if stripped else shown
    key = {"authorization": "Bearer key"}
    assert (await api.http.post(f"{front}/v1/completions", json={"prompt": "a"}, headers=key)).status_code == 200
    assert (await api.http.get(f"{front}/v1/models", headers=key)).status_code == 200
    assert (await api.http.get(f"{front}/v1/models")).status_code == 401
    assert (await api.http.get(f"{front}/health")).status_code == 200
    docs = await api.http.get(f"{front}/docs", headers=key)
    assert f"{shown}/openapi.json" in docs.text
    described = (await api.http.get(f"{front}/openapi.json", headers=key)).json()
    assert {"url": shown} in described["servers"]
