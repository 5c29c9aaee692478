"""Mirroring: an engine that dropped its cache without an event is learned anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.engine_adapter.engine import EngineCall, EngineFacts, KvEventSource
from kvferry.engine_adapter.kv_event_batch import decode
from kvferry.engine_adapter.mirroring import MISSES, Mirroring
from kvferry.protocol.adapter_metrics import AdapterMetrics
from kvferry.protocol.messages import Job
from kvferry.protocol.model_metrics import ModelRegistry
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate
from tests.engine_adapter.mock_kv_events import pack

SIZE, TEXT = 16, tuple(range(100, 140))
STORED = {
    "type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": list(TEXT[:32]),
    "block_size": SIZE, "medium": "GPU", "group_idx": 0,
}  # fmt: skip


def mirroring() -> tuple[Mirroring, set[bytes]]:
    """A mirror that holds two blocks, and the rows that the index has of it."""
    noted: set[bytes] = set()

    def note(stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        noted.difference_update(removed)
        noted.update(stored)

    facts = EngineFacts("vllm", "0.32.0", "1", "/models/toy", ("toy",), 4096, SIZE)
    source = KvEventSource("inproc://nobody")
    made = Mirroring(facts, source, "fingerprint", {}, note=note, lost=lambda why: None)
    made.mirror.take(decode(pack([STORED])))
    assert len(noted) == 2
    return made, noted


def call(made: Mirroring, number: int, cached: int, **params: Any) -> None:
    job = Job(f"r{number}", 0, TEXT, len(TEXT), Generate(SamplingParams(**params)), "router")
    made.sent(job, EngineCall(job.request_id, TEXT, job.params))
    made.ended(job, cached)


def test_rows_go_once_the_engine_reuses_nothing_of_them():
    made, noted = mirroring()
    for number in range(MISSES):
        assert len(noted) == 2
        call(made, number, 0)
    assert noted == set()
    metrics = AdapterMetrics(ModelRegistry())
    made.set_gauges(metrics)
    assert made.mirror.blocks == 0
    made.mirror.take(decode(pack([STORED])))
    call(made, MISSES, 0)
    assert len(noted) == 2, "what was learned anew counts from the beginning"


def test_requests_for_log_probabilities_of_the_prompt_reuse_nothing_and_tell_nothing():
    made, noted = mirroring()
    for number in range(2 * MISSES):
        call(made, number, 0, prompt_logprobs=1)
    assert len(noted) == 2
    assert made.accuracy.calls == 0
