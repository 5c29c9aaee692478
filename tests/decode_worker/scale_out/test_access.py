"""Who may use the API of token ids: members of the cluster, or holders of its own key."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.runtime.cluster_secret import HEADER, read_secrets
from tests.decode_worker.scale_out.generate_client import client_of
from tests.toy import expected, make_engine
from tests.worker_pair import worker

SECRET, KEY = "0123456789abcdef", "a key of the API"
MEMBER = {HEADER: read_secrets(SECRET)[0].token}
BEARER = {"authorization": f"Bearer {KEY}"}
PROMPT = [5, 17, 80, 2]


@pytest.mark.parametrize(
    ("settings", "headers", "status"),
    [
        ({"cluster_secret": SECRET}, {}, 403),
        ({"cluster_secret": SECRET}, MEMBER, 200),
        ({"cluster_secret": SECRET}, BEARER, 403),
        ({"cluster_secret": SECRET, "scale_out_api_key": KEY}, BEARER, 200),
        ({"cluster_secret": SECRET, "scale_out_api_key": KEY}, MEMBER, 401),
        ({"cluster_secret": SECRET, "scale_out_api_key": KEY}, {"authorization": "Bearer a key"}, 401),
        ({"scale_out_api_key": KEY}, BEARER, 200),
        ({"scale_out_api_key": KEY}, {}, 401),
        ({"scale_out_api_key": KEY}, {"authorization": KEY}, 401),
    ],
)
async def test_members_or_holders_of_the_key(settings: dict[str, Any], headers: dict[str, str], status: int) -> None:
    async with worker("decode", make_engine(), enable_scale_out=True, **settings) as node, client_of(node) as client:
        answer = await client.post(PROMPT, headers=headers)
        assert answer.status_code == status
        if status == 200:
            assert answer.json()["choices"][0]["token_ids"] == expected(PROMPT, 8)
        abort = await client.http.post("/abort_requests", json={"request_ids": []}, headers=headers)
        assert abort.status_code == status
        for path in ("/v1/models", "/kv_event_sources"):
            assert (await client.http.get(path, headers=headers)).status_code == status


async def test_the_key_opens_nothing_else() -> None:
    settings: dict[str, Any] = {"cluster_secret": SECRET, "scale_out_api_key": KEY}
    async with worker("decode", make_engine(), enable_scale_out=True, **settings) as node, client_of(node) as client:
        for path in ("/attempts/generate", "/attempts/cancel", "/adapters", "/inference/v1/generate/", "/role"):
            assert (await client.http.post(path, headers=BEARER)).status_code == 403
