"""A scrape of the router tells tenants' names to the operator's key alone, and to a tenant only its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvferry.router.tenants.keys import entry
from tests.api_parts import Api, FakeCluster, says


def tenants_in(text: str) -> set[str]:
    return set(re.findall(r'tenant="([^"]*)"', text))


async def used(tmp_path: Path, **settings: Any) -> Api:
    file = tmp_path / "keys.toml"
    file.write_text(entry("acme", "a") + entry("other", "o"))
    api = Api(FakeCluster(says("Yes.")), api_keys=str(file), **settings)
    for key in ("a", "o"):
        answer = await api.http.post(
            "/v1/completions", json={"prompt": "x"}, headers={"authorization": f"Bearer {key}"}
        )
        assert answer.status_code == 200
    return api


@pytest.mark.parametrize(
    ("key", "shown"),
    [(None, set()), ("wrong", set()), ("a", {"acme"}), ("own", {"acme", "other"})],
)
async def test_who_sees_which_tenants(tmp_path: Path, key: str | None, shown: set[str]) -> None:
    api = await used(tmp_path, api_key="own")
    answer = await api.http.get("/metrics", headers={} if key is None else {"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, "a scrape needs no key"
    assert tenants_in(answer.text) - {""} == shown
    assert "kvferry_requests_total" in answer.text
    assert "# TYPE kvferry_tenant_tokens_total counter" in answer.text


async def test_without_keys_nothing_is_hidden(tmp_path: Path) -> None:
    api = Api(FakeCluster(says("Yes.")))
    api.metrics.tenant_tokens.labels("acme", "prompt").inc()
    assert "acme" in tenants_in((await api.http.get("/metrics")).text)
