"""A cluster under attack: its tenants' clients, its secrets, and whether it goes on as if nothing were."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.local_cluster import MODEL, LocalCluster

TENANTS = ("acme-marker", "zeta-marker")
"""Names that no text contains by chance."""
MARKER = "The velvet walrus juggles seventeen cobalt pineapples beneath Saturn. "
"""What clients say and nobody else may find."""
COUNTING = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20,"
"""It goes on in one way, whatever is computed beside it."""


@dataclass
class Attacked:
    """keys: by tenant; the operator's own under the empty name."""

    cluster: LocalCluster
    home: Path
    secret: str
    keys: dict[str, str]
    expected: dict[int, list[int]] = field(default_factory=dict)
    _client: httpx.Client | None = None

    @property
    def secrets(self) -> list[str]:
        return [self.secret, *self.keys.values()]

    def ask(self, method: str, path: str, tenant: str | None = "", **more: Any) -> httpx.Response:
        """A request with the key of the tenant; None: with none."""
        headers = {"authorization": f"Bearer {self.keys[tenant]}"} if tenant is not None else {}
        if self._client is None:
            self._client = httpx.Client(base_url=self.cluster.url, trust_env=False, timeout=120)
        return self._client.request(method, path, headers=headers | more.pop("headers", {}), **more)

    def says(self, text: str, tenant: str = "", tokens: int = 8, **more: Any) -> dict[str, Any]:
        """The answer to a chat of one message."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": tokens, **more}
        answer = self.ask("POST", "/v1/chat/completions", tenant, json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def tokens(self, count: int = 12) -> list[int]:
        """What the cluster makes of the one prompt, greedily."""
        body = {
            "model": MODEL, "prompt": COUNTING, "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        answer = self.ask("POST", "/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])

    def goes_on(self) -> None:
        """The same tokens as at the first time."""
        now = self.tokens()
        assert now == self.expected.setdefault(len(now), now)
        assert self.cluster.process.poll() is None
