"""A histogram for what comes with every token, beside prometheus_client's own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from kvferry.protocol.token_histogram import TokenHistograms

BOUNDS = (0.001, 0.5, 2)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0.0, 0.001, 0.0011, 0.5, 1.0, 2.0, 3.0]))))
def test_it_tells_what_the_library_would(amounts: list[tuple[str, float]]) -> None:
    own, library = CollectorRegistry(), CollectorRegistry()
    tallies = TokenHistograms("x_seconds", "Seconds.", ["model_name"], registry=own, buckets=BOUNDS)
    known = Histogram("x_seconds", "Seconds.", ["model_name"], registry=library, buckets=BOUNDS)
    for metric in (tallies, known):
        for model in "ab":
            metric.labels(model)
        for model, amount in amounts:
            metric.labels(model).observe(amount)
    told = [line for line in generate_latest(library).splitlines() if b"_created" not in line]
    assert generate_latest(own).splitlines() == told


def test_what_comes_several_times_counts_so_often() -> None:
    registry = CollectorRegistry()
    TokenHistograms("x", "X.", ["model_name"], registry=registry, buckets=BOUNDS).labels("a").observe(0.25, 4)
    found = {sample.name: sample.value for metric in registry.collect() for sample in metric.samples}
    assert (found["x_count"], found["x_sum"]) == (4, 1.0)
