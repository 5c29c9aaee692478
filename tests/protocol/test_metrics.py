"""Metrics: conventions of the names, and series that exist before the first event."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
from prometheus_client import Counter, Gauge, Histogram, generate_latest

from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.token_histogram import TokenHistograms
from kvferry.protocol.worker_metrics import WorkerMetrics
from tests.deploy.binaries import need, promtool_binary
from tests.deploy.dashboard import serving_router

Metrics = RouterMetrics | WorkerMetrics
SETS: dict[str, Callable[[], Metrics]] = {
    "router": serving_router,
    "prefill": lambda: WorkerMetrics("prefill"),
    "decode": lambda: WorkerMetrics("decode"),
}


@pytest.fixture(params=SETS)
def metrics(request: pytest.FixtureRequest) -> Metrics:
    return SETS[request.param]()


def test_names_and_help(metrics: Metrics) -> None:
    families = list(metrics.registry.collect())
    assert len(families) >= 15
    for family in families:
        assert family.name.startswith("kvferry_")
        assert family.documentation.endswith(".")
        assert len(family.documentation) > 15
        assert family.type in ("counter", "gauge", "histogram")
        assert family.type == "counter" or not family.name.endswith("_total"), family.name


def test_every_attribute_is_served_and_alive_before_the_first_event(metrics: Metrics) -> None:
    served = {family.name: family.samples for family in metrics.registry.collect()}
    assert not [name for name, samples in served.items() if not samples]
    names = (
        "canary",
        "fetches",
        "tiers",
        "speculation",
        "sessions",
        "reuse",
        "scaling",
        "loop",
        "journals",
        "batches",
        "states",
        "media",
        "encodes",
    )
    rooms = [getattr(metrics, name) for name in names if hasattr(metrics, name)]
    parts = [part for room in (metrics, *rooms) for part in vars(room).values()]
    held = [m for m in parts if isinstance(m, Counter | Gauge | Histogram | TokenHistograms | dict)]
    assert len(held) == len(served)


def test_worker_series_carry_the_role_and_known_labels() -> None:
    metrics = WorkerMetrics("prefill")
    sample = metrics.registry.get_sample_value
    assert sample("kvferry_grants_total", {"role": "prefill", "outcome": "refused"}) == 0
    assert sample("kvferry_kv_blocks", {"role": "prefill", "state": "granted"}) == 0
    assert sample("kvferry_queue_seconds_count", {"role": "prefill"}) == 0
    metrics.grants["refused"].inc()
    assert sample("kvferry_grants_total", {"role": "prefill", "outcome": "refused"}) == 1
    assert sample("kvferry_grants_total", {"role": "decode", "outcome": "refused"}) is None


def test_all_of_a_node_names_its_model_once_that_is_known() -> None:
    metrics = WorkerMetrics("decode")
    assert b"model_name" not in generate_latest(metrics.registry)
    metrics.registry.model_name = "m"
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    assert len(samples) > 100
    assert {sample.labels["model_name"] for sample in samples} == {"m"}
    assert metrics.registry.get_sample_value("kvferry_requests_waiting", {"role": "decode", "model_name": "m"}) == 0


def test_router_series_exist_at_zero() -> None:
    metrics = RouterMetrics()
    sample = metrics.registry.get_sample_value
    assert sample("kvferry_retries_total", {"step": "local_prefill"}) == 0
    metrics.of("m")
    assert sample("kvferry_nodes", {"role": "decode", "state": "draining", "model_name": "m"}) == 0
    assert sample("kvferry_prompt_tokens_total", {"model_name": "m", "source": "reused_decode"}) == 0


def test_two_sets_do_not_share_state() -> None:
    one, two = RouterMetrics(), RouterMetrics()
    one.of("m").output_tokens.inc(5)
    two.of("m")
    assert two.registry.get_sample_value("kvferry_output_tokens_total", {"model_name": "m"}) == 0


def test_promtool_finds_no_lint(metrics: Metrics) -> None:
    binary = need(promtool_binary(), "promtool")
    page = generate_latest(metrics.registry)
    checked = subprocess.run([binary, "check", "metrics"], input=page, capture_output=True, timeout=60)
    assert checked.returncode == 0, checked.stderr.decode()


def test_what_is_counted_stays_in_its_role_and_gauges_go_with_the_node() -> None:
    metrics = WorkerMetrics("prefill")
    read = metrics.registry.get_sample_value
    metrics.evictions.inc(3)
    metrics.requests_waiting.set(5)
    metrics.count_as("decode")
    metrics.evictions.inc(4)
    evicted = "kvferry_kv_blocks_evicted_total"
    assert [read(evicted, {"role": role}) for role in ("prefill", "decode")] == [3, 4]
    assert [read("kvferry_requests_waiting", {"role": role}) for role in ("prefill", "decode")] == [None, 0]
    metrics.count_as("prefill")
    metrics.evictions.inc()
    assert [read(evicted, {"role": role}) for role in ("prefill", "decode")] == [4, 4]
