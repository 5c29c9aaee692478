from __future__ import annotations

import sys

import pytest

from kvferry.runtime.tracing import TRACER, Tracer, is_requested
from tests.otlp_receiver import attributes, collector, traced

TRACE = f"00-{'1' * 32}-{'2' * 16}-01"


def test_traces_are_sent_only_where_opentelemetrys_variables_say_where() -> None:
    where = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"}
    assert is_requested(where)
    assert is_requested({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x:4318/v1/traces"})
    assert not is_requested({})
    assert not is_requested({**where, "OTEL_SDK_DISABLED": "true"})
    assert not is_requested({**where, "OTEL_TRACES_EXPORTER": "none"})


def test_without_traces_the_context_is_passed_on() -> None:
    span = TRACER.start("request", TRACE, tokens=3)
    span.set_attributes(more=1)
    span.end("failed")
    assert span.trace == TRACE
    assert not TRACER.records


def test_spans_arrive_with_parent_attributes_and_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    with traced(monkeypatch) as found:
        assert TRACER.records
        outer = TRACER.start("request", TRACE)
        inner = TRACER.start("ship", outer.trace, 0.5, blocks=3)
        inner.end("node_lost")
        inner.end()
        outer.end()
    ship, request = found.one("ship"), found.one("request")
    assert request.trace_id.hex() == ship.trace_id.hex() == "1" * 32
    assert request.parent_span_id.hex() == "2" * 16
    assert ship.parent_span_id == request.span_id
    assert outer.trace == f"00-{'1' * 32}-{request.span_id.hex()}-01"
    assert 0.5e9 <= ship.end_time_unix_nano - ship.start_time_unix_nano < 2e9
    assert attributes(ship) == {"blocks": 3}
    assert (ship.status.code, ship.status.message) == (2, "node_lost")
    assert found.services == {"kvferry-test"}


def test_the_service_has_the_name_that_the_variable_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front")
    with traced(monkeypatch) as found:
        TRACER.start("request", "").end()
    assert found.services == {"front"}


def test_without_the_sdk_there_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    tracer = Tracer()
    with collector() as found:
        tracer.set_up("x")
        tracer.start("request", "").end()
        tracer.close()
    assert caplog.text.count("kvferry[otel]") == 1
    assert found.all == []
