"""The JSON of --kv-events-config: vLLM's fields, and mistakes that are named."""

from __future__ import annotations

import importlib.util

import pytest

from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker.kv_events.config import KvEventsConfig, read_kv_events_config
from kvferry.worker.kv_events.publisher import ReplayRing
from kvferry.worker.node import Node


def test_vllms_configuration_is_taken() -> None:
    given = (
        '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557",'
        '"replay_endpoint":"tcp://127.0.0.1:5558","buffer_steps":100,"topic":"kv"}'
    )
    wanted = KvEventsConfig(True, "zmq", "tcp://*:5557", "tcp://127.0.0.1:5558", 100, "kv")
    assert read_kv_events_config(given) == wanted
    assert read_kv_events_config("{}") == KvEventsConfig()


@pytest.mark.parametrize("text", ["", '{"enable_kv_cache_events": false}', '{"publisher": "null"}'])
def test_events_can_be_off(text: str) -> None:
    assert read_kv_events_config(text) is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not valid JSON"),
        ("[]", "JSON object"),
        ('{"hwm": 1}', "no field 'hwm'"),
        ('{"publisher": "kafka"}', "publisher must be zmq or null"),
        ('{"endpoint": "5557"}', "endpoint must be a ZeroMQ address"),
        ('{"replay_endpoint": "http://a"}', "replay_endpoint must be"),
        ('{"buffer_steps": 0}', "buffer_steps must be a number from 1"),
        ('{"buffer_steps": true}', "buffer_steps must be"),
        ('{"enable_kv_cache_events": "yes"}', "true or false"),
        ('{"topic": 1}', "topic must be a text"),
    ],
)
def test_mistakes_are_named_before_the_model_is_loaded(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        Node(WorkerSettings(kv_events_config=text), lambda base: None)  # type: ignore[arg-type, return-value]
    assert caught.value.param == "kv_events_config"


def test_without_pyzmq_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'kvferry\[adapter\]'"):
        read_kv_events_config("{}")
    assert read_kv_events_config('{"publisher": "null"}') is None


def test_a_ring_keeps_the_latest_batches_within_its_bytes() -> None:
    ring = ReplayRing(steps=4, most_bytes=10)
    for number in range(6):
        ring.put(number, b"ab")
    assert [number for number, _ in ring.since(0)] == [2, 3, 4, 5]
    assert list(ring.since(5)) == [(5, b"ab")]
    assert list(ring.since(9)) == []
    ring.put(6, b"123456789")
    assert list(ring.since(0)) == [(6, b"123456789")]
