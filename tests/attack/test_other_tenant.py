"""Attacker: a tenant with a valid key of its own, which wants what another tenant sent, stored or has cached.

At most it slows its neighbour down, and learns how loaded the cluster is."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest

from tests.attack.attacked import COUNTING, MARKER, TENANTS, Attacked
from tests.local_cluster import MODEL
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
OWNER, THIEF = TENANTS
RANDOM_BITS = 128


@dataclass(frozen=True)
class Goods:
    """Ids of what the owner has: all of them unguessable."""

    file: str
    batch: str
    response: str
    background: str

    def routes(self) -> list[tuple[str, str, Any]]:
        """Every request that would read, change or use them."""
        told: list[tuple[str, str, Any]] = [
            ("GET", f"/v1/files/{self.file}", None),
            ("GET", f"/v1/files/{self.file}/content", None),
            ("DELETE", f"/v1/files/{self.file}", None),
            ("GET", f"/v1/batches/{self.batch}", None),
            ("POST", f"/v1/batches/{self.batch}/cancel", None),
            ("POST", "/v1/batches", _batch(self.file)),
        ]
        for each in (self.response, self.background):
            told += [
                ("GET", f"/v1/responses/{each}", None),
                ("GET", f"/v1/responses/{each}/input_items", None),
                ("POST", f"/v1/responses/{each}/cancel", None),
                ("DELETE", f"/v1/responses/{each}", None),
                ("POST", "/v1/responses", {"model": MODEL, "input": "what did I say?", "previous_response_id": each}),
            ]
        return told


@pytest.fixture(scope="module")
def goods(shared_attacked: Attacked) -> Goods:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": MARKER}], "max_tokens": 2}
    row = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat})
    form = {"files": {"file": ("secret-name.jsonl", row)}, "data": {"purpose": "batch"}}
    file = shared_attacked.ask("POST", "/v1/files", OWNER, **form).json()["id"]
    batch = shared_attacked.ask("POST", "/v1/batches", OWNER, json=_batch(file)).json()["id"]
    said = {"model": MODEL, "input": MARKER, "max_output_tokens": 16}
    response = shared_attacked.ask("POST", "/v1/responses", OWNER, json=said).json()["id"]
    later = shared_attacked.ask("POST", "/v1/responses", OWNER, json=said | {"background": True}).json()["id"]
    return Goods(file, batch, response, later)


def test_another_tenants_things_do_not_exist(attacked: Attacked, goods: Goods) -> None:
    """At most: 404, in words that would be the same for an id that was never given."""
    for method, path, body in goods.routes():
        answer = attacked.ask(method, path, THIEF, **({"json": body} if body else {}))
        assert answer.status_code == 404, (method, path, answer.text)
        assert not any(word in answer.text for word in ("pineapples", "secret-name", OWNER))
    for path in ("/v1/files", "/v1/batches"):
        assert attacked.ask("GET", path, THIEF).json()["data"] == []
    assert attacked.ask("GET", f"/v1/responses/{goods.response}", OWNER).status_code == 200
    assert attacked.ask("GET", f"/v1/files/{goods.file}/content", OWNER).status_code == 200

    def ended() -> bool:
        batch = attacked.ask("GET", f"/v1/batches/{goods.batch}", OWNER).json()
        later = attacked.ask("GET", f"/v1/responses/{goods.background}", OWNER).json()
        return bool(batch["status"] == "completed" and later["status"] in ("completed", "incomplete"))

    wait_for(ended, 60)


def test_ids_cannot_be_guessed(attacked: Attacked, goods: Goods) -> None:
    """At most: one in 2^128. What a client names itself is still its own alone."""
    for each in (goods.file, goods.batch, goods.response, goods.background):
        digits = re.sub(r"^[a-z]+[_-]", "", each)
        assert len(re.sub("[^0-9a-f]", "", digits)) * 4 >= RANDOM_BITS, each
    for path in ("..", "%2e%2e%2f", f"../{goods.file}", goods.file.upper(), goods.file[:-1], f"{goods.file}%00"):
        answer = attacked.ask("GET", f"/v1/files/{path}/content", THIEF)
        assert answer.status_code in (400, 404), (path, answer.text)


def test_a_cached_prefix_of_another_tenant_is_no_faster(attacked: Attacked) -> None:
    """At most: nothing; its own second prompt shows that reuse works."""

    prompt = uuid4().hex + MARKER * 12  # new, also when the test is tried again

    def cached(tenant: str, **more: str) -> int:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, **more}
        usage = attacked.ask("POST", "/v1/completions", tenant, json=body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(OWNER) == 0
    wait_for(lambda: cached(OWNER) >= 64, 20)
    assert cached(THIEF, cache_salt=OWNER) == 0
    assert cached(THIEF) == 0


def test_metrics_and_dashboards_show_a_tenant_itself_alone(attacked: Attacked) -> None:
    """At most: counts over all tenants, without names."""
    request_id = "owners-own-request-id"
    body = {"model": MODEL, "prompt": COUNTING, "max_tokens": 2}
    attacked.ask("POST", "/v1/completions", OWNER, json=body, headers={"x-request-id": request_id})
    time.sleep(0.5)
    assert OWNER in attacked.ask("GET", "/metrics").text, "the operator sees it"
    for path in ("/metrics", "/dashboard/state", "/dashboard/view", "/dashboard", "/targets", "/ready", "/v1/models"):
        seen = attacked.ask("GET", path, THIEF)
        assert seen.status_code == 200
        assert OWNER not in seen.text, path
        assert request_id not in seen.text, path
        assert str(attacked.home) not in seen.text, path


def _batch(file: str) -> dict[str, str]:
    return {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
