from __future__ import annotations

import pytest

from kvferry.protocol.errors import KvferryError, NoNodes, Overloaded
from tests.api_parts import Api, FakeCluster, error_of, says


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (Overloaded("full", retry_after=0.2), 1),
        (Overloaded("full", retry_after=2.1), 3),
        (Overloaded("full"), None),
        (NoNodes("none"), None),
        (NoNodes("none", retry_after=0.0), 1),
    ],
    ids=repr,
)
async def test_whoever_is_turned_away_is_told_when_to_come_back(error: KvferryError, seconds: int | None) -> None:
    api = Api(FakeCluster(says("x")))
    api.cluster.refusal = error
    for response in (await api.chat(), await api.complete(stream=True)):
        assert response.status_code == error.status
        assert error_of(response)["message"] in ("full", "none")
        told = response.headers["retry-after"]
        assert told.isdecimal()
        assert int(told) == seconds if seconds else int(told) >= 1


async def test_a_router_that_is_not_ready_tells_when_to_ask_again() -> None:
    api = Api(FakeCluster(says("x")))
    assert "retry-after" not in (await api.http.get("/ready?nodes=1")).headers
    api.cluster.is_ready = False
    assert int((await api.http.get("/ready?nodes=1")).headers["retry-after"]) >= 1


async def test_a_bug_s_answer_and_log_line_have_the_request_s_id_too(caplog: pytest.LogCaptureFixture) -> None:
    api = Api(FakeCluster(says("x")))
    api.cluster.ready = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        await api.http.get("/ready")
    api.http._transport.raise_app_exceptions = False  # type: ignore[attr-defined]
    response = await api.http.get("/ready", headers={"x-request-id": "mine"})
    assert (response.status_code, error_of(response)["code"]) == (500, "server_error")
    assert response.headers["x-request-id"] == "mine"
    assert "mine: GET /ready failed" in caplog.text
