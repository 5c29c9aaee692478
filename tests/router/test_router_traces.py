"""The router's spans: a request, its wait for a turn, its attempts; and the context that workers get."""

from __future__ import annotations

import httpx
import pytest

from kvferry.protocol.messages import AttemptFailed, PrefillRequest
from kvferry.protocol.router_metrics import RouterMetrics
from tests.api_parts import app_of, demo_text
from tests.fake_workers import Answer, Bench, FakeWorker, decode, honest_prefill, prefill
from tests.otlp_receiver import attributes, traced

TRACE = f"00-{'a' * 32}-{'b' * 16}-01"
SECRET = "ferryboat"


async def test_a_request_is_one_trace_over_its_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    async def fails_first(worker: FakeWorker, request: PrefillRequest) -> Answer:
        told.append(request.job.trace)
        if len(told) == 1:
            yield AttemptFailed(request.job.request_id, request.job.attempt, "server_error", "gone")
            return
        async for answer in honest_prefill(worker, request):
            yield answer

    with traced(monkeypatch) as found:
        async with Bench([prefill(prefill_script=fails_first), decode()]) as bench:
            app = app_of(bench.cluster, demo_text(), RouterMetrics())
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as http:
                body = {"prompt": f"{SECRET} " * 20, "max_tokens": 4}
                headers = {"traceparent": TRACE, "x-request-id": "order-7"}
                answer = await http.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                missing = await http.post("/v1/completions", json={**body, "model": "none"}, headers=headers)
                assert missing.status_code == 404
    whole, refused = sorted(found.named("request"), key=lambda span: span.start_time_unix_nano)
    assert {span.trace_id.hex() for span in found.all} == {"a" * 32}
    assert whole.parent_span_id.hex() == "b" * 16
    seen = attributes(whole)
    assert (seen["id"], seen["status"], seen["endpoint"]) == ("order-7", 200, "/v1/completions")
    assert (seen["prompt_tokens"], seen["output_tokens"]) == (answer.json()["usage"]["prompt_tokens"], 4)
    assert attributes(refused)["status"] == 404
    assert found.one("queue").parent_span_id == whole.span_id
    first, second = sorted(found.named("attempt"), key=lambda span: span.start_time_unix_nano)
    assert {first.parent_span_id, second.parent_span_id} == {whole.span_id}
    assert first.status.code == 2
    assert second.status.code == 0
    assert attributes(second)["decode"] == "d1"
    assert [trace.split("-")[2] for trace in told] == [first.span_id.hex(), second.span_id.hex()]
    assert SECRET not in str(found.all)
