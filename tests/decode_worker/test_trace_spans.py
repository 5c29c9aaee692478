"""The spans of workers: computing, shipping, decoding, all within the attempt's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.decode_worker import trace_spans as spans_module
from kvferry.decode_worker.trace_spans import TraceSpans
from tests.otlp_receiver import attributes, traced
from tests.toy import make_job
from tests.waiting import until
from tests.worker_pair import pair

TRACE = f"00-{'a' * 32}-{'b' * 16}-01"
PROMPT = list(range(3, 40))


async def test_a_job_is_traced_over_both_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    with traced(monkeypatch) as found:
        async with pair() as router:
            job = replace(make_job("a", PROMPT, max_tokens=5), trace=TRACE)
            await router.post_prefill(job, router.decode.target).ended()
            await until(lambda: router.finished("a"))
            local = replace(make_job("b", PROMPT, max_tokens=3), trace=TRACE)
            assert (await router.generate(local)).status_code == 202
            await until(lambda: router.finished("b"))
            for worker in (router.prefill, router.decode):
                await worker.settle()
    assert {span.parent_span_id.hex() for span in found.all} == {"b" * 16}
    computed, shipped = attributes(found.one("prefill")), attributes(found.one("ship"))
    assert (computed["computed_tokens"], computed["cached_tokens"]) == (len(PROMPT), 0)
    assert computed["compute_s"] > 0
    assert shipped["blocks"] > 0
    assert shipped["bytes"] > 0
    assert [attributes(span)["output_tokens"] for span in found.named("decode")] == [5, 3]


async def test_spans_whose_end_never_comes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans_module, "MAX_OPEN", 3)
    with traced(monkeypatch) as found:
        spans = TraceSpans()
        for number in range(5):
            spans.begin(make_job(f"r{number}", PROMPT))
    assert [span.status.message for span in found.named("decode")] == ["forgotten", "forgotten"]


def test_nothing_is_kept_without_traces() -> None:
    spans = TraceSpans()
    spans.begin(make_job("a", PROMPT))
    assert spans._open == {}
