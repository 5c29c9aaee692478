"""Gauges of an adapter: what they say about its engine, its guarantees and streams of other nodes."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvferry.engine_adapter.engine import EngineCall, EngineFacts, EngineLoad
from kvferry.engine_adapter.engine_watch import EngineWatch
from kvferry.engine_adapter.node_state import NodeState
from kvferry.protocol.adapter_metrics import AdapterMetrics
from kvferry.protocol.lease import Rates
from kvferry.protocol.messages import Job
from kvferry.protocol.node_settings import AdapterSettings
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate
from kvferry.protocol.worker_metrics import WorkerMetrics

FACTS = EngineFacts("vllm", "0.32.0", "p", "/m/toy", ("toy",), 4096, 16, total_blocks=100, max_num_seqs=8)
PROMPT = tuple(range(10))


def state(guarantees: tuple[str, ...] = (), *, running: int = 0) -> NodeState:
    watch = EngineWatch(cast("Any", None), "p")
    made = NodeState(AdapterSettings(), cast("Any", SimpleNamespace(node_id="n")), FACTS, guarantees, 77, watch)
    made.attempts = cast("Any", SimpleNamespace(running=running, waiting_tokens=0))
    made.membership = cast("Any", SimpleNamespace(set_gauges=lambda: None))
    return made


class Exported:
    """Metrics of an adapter by sample name and the value of their own label, as they are scraped."""

    def __init__(self) -> None:
        self.node = WorkerMetrics("decode")
        self.engine = AdapterMetrics(self.node.registry)

    def of(self, made: NodeState) -> dict[tuple[str, ...], float]:
        made.set_gauges(self.node, self.engine)
        samples = [each for family in self.node.registry.collect() for each in family.samples]
        return {(each.name, *each.labels.values()): each.value for each in samples}


def job(delivered: int) -> Job:
    tokens = (*PROMPT, *range(100, 100 + delivered))
    return Job("r", 1, tokens, len(PROMPT), Generate(SamplingParams(max_tokens=64)), "router")


def call(tokens: tuple[int, ...]) -> EngineCall:
    return EngineCall("c", tokens, SamplingParams())


def test_streams_of_other_nodes_are_counted_by_the_way_they_went_on() -> None:
    made = state()
    made.sent(job(0), call(PROMPT))
    made.sent(job(5), call((*PROMPT, *range(100, 105))))
    for delivered in (7, 30):
        made.sent(job(delivered), call(PROMPT))
    found = Exported().of(made)
    assert found["kvferry_engine_continued_streams", "resumed"] == 1
    assert found["kvferry_engine_continued_streams", "replayed"] == 2
    assert found["kvferry_engine_swallowed_tokens",] == 37


def test_guarantees_are_what_was_measured_and_follow_what_the_operator_accepts() -> None:
    found = Exported().of(state(("greedy_replay", "kv_events")))
    kept = {name[1] for name, value in found.items() if name[0] == "kvferry_engine_guarantee" and value}
    known = {name[1] for name in found if name[0] == "kvferry_engine_guarantee"}
    assert kept == {"greedy_replay", "kv_events"}
    lacks = {"greedy_resume", "seeded_resume", "seeded_replay", "batch_invariant", "embeds", "classifies"}
    assert lacks == known - kept


def test_an_engine_is_up_until_it_hangs_or_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    exported, made = Exported(), state()
    before = {each.name: each.value for family in exported.node.registry.collect() for each in family.samples}
    assert before["kvferry_engine_up"] == 0, "nothing is known of the engine yet"
    assert "kvferry_engine_epoch" not in before, "a zero would count as one more start"
    assert exported.of(made)["kvferry_engine_up",] == 1
    assert exported.of(made)["kvferry_engine_epoch", "vllm 0.32.0"] == 77
    monkeypatch.setattr(EngineWatch, "still_s", 2.5)
    assert exported.of(made)["kvferry_engine_up",] == 0
    monkeypatch.setattr(EngineWatch, "still_s", 0.0)
    assert exported.of(made)["kvferry_engine_up",] == 1
    made.watch.end("gone")
    assert exported.of(made)["kvferry_engine_up",] == 0


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (EngineLoad(), 0.0),
        (EngineLoad(running_requests=4, cache_usage=0.2), 0.5),
        (EngineLoad(running_requests=2, cache_usage=0.9), 0.9),
        (EngineLoad(running_requests=8, waiting_requests=16, cache_usage=0.5), 3.0),
    ],
    ids=["idle", "slots", "blocks", "queue"],
)
def test_decode_pressure_is_that_of_the_engine(load: EngineLoad, expected: float) -> None:
    """Eight requests or a hundred blocks fill one engine; what waits beyond its slots needs more of them."""
    made = state()
    made.watch.load = load
    assert Exported().of(made)["kvferry_decode_pressure", "decode"] == pytest.approx(expected)


@pytest.mark.parametrize(("role", "pressure"), [("decode", 0.5), ("prefill", 0.0)])
def test_the_lease_of_an_elastic_node_says_what_rebalancing_needs(role: str, pressure: float) -> None:
    made = state()
    made.settings = replace(made.settings, role=role, elastic=True)
    made.address = cast("Any", SimpleNamespace(node_id="n", url="http://n"))
    made.attempts.rates = cast("Any", SimpleNamespace(rates=Rates()))
    made.draining = lambda: False
    made.watch.load = EngineLoad(running_requests=4)
    lease = made.lease()
    assert (lease.role, lease.elastic, lease.role_s, lease.pressure) == (role, True, 0.0, pressure)
    made.role_at = time.monotonic() - 7
    assert made.lease().role_s == pytest.approx(7, abs=1)
    made.settings = replace(made.settings, elastic=False)
    assert not made.lease().elastic
