"""Who computes where with how much memory, on machines that are made up."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from typing import Any

import pytest

from kvferry.cli import resource_plan
from kvferry.cli.formats import kv_dtype, weight_bytes
from kvferry.cli.resource_plan import GIB, WorkerPlan, plan_workers, require_memory
from kvferry.model_files.memory_needs import ModelNeeds
from kvferry.model_files.weight_counts import WeightCount
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import ServeSettings

WEIGHTS_GIB = 4
NEEDS = ModelNeeds(
    dense=WeightCount(weights=WEIGHTS_GIB * GIB // 2, plain=WEIGHTS_GIB * GIB // 2, active=1.0),
    embedding=WeightCount(),
    head=WeightCount(),
    layers=16,
    kv_heads=8,
    head_dim=128,
    query_size=1024,
    max_model_len=8192,
    own=True,
)
BLOCK = 16 * 16 * 2 * 8 * 128 * 2
"""Bytes of a block of 16 tokens in bfloat16."""


def seated(gpu_gib: Sequence[float] = (), **settings) -> list[WorkerPlan]:
    return plan_workers(ServeSettings(**settings), [NEEDS], [int(size * GIB) for size in gpu_gib])


@pytest.mark.parametrize(
    ("device", "gpu_count", "expected"),
    [
        ("auto", 0, ["cpu"] * 3),
        ("auto", 1, ["cuda:0"] * 3),
        ("auto", 2, ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda", 4, ["cuda:0", "cuda:1", "cuda:2"]),
        ("cuda:1", 2, ["cuda:1"] * 3),
        ("cpu", 2, ["cpu"] * 3),
    ],
)
def test_workers_go_round_the_gpus(device, gpu_count, expected):
    assert [plan.device for plan in seated([80] * gpu_count, device=device, prefill=1, decode=2)] == expected


@pytest.mark.parametrize(
    ("device", "gpu_count", "expected"),
    [
        ("auto", 0, ["cpu"] * 3),
        ("auto", 2, ["cuda:0"] * 3),
        ("auto", 5, ["cuda:0", "cuda:2", "cuda:0"]),
        ("cuda:1", 3, ["cuda:1"] * 3),
        ("cpu", 2, ["cpu"] * 3),
    ],
)
def test_a_worker_of_two_ranks_has_two_gpus_beside_each_other(device, gpu_count, expected):
    found = seated([80] * gpu_count, device=device, prefill=1, decode=2, tensor_parallel_size=2)
    assert [plan.device for plan in found] == expected


@pytest.mark.parametrize(("device", "there"), [("auto", "one"), ("cuda", "one"), ("cuda:1", "are 2")])
def test_ranks_without_a_gpu_each_are_refused(device, there):
    count = 2 if there == "are 2" else 1
    with pytest.raises(ConfigError, match=f"--device {device}: its 2 ranks need one GPU each, there (is )?{there}"):
        seated([80] * count, device=device, tensor_parallel_size=2)


def test_each_gpu_of_a_workers_ranks_has_its_part_of_weights_and_pool():
    shared, again = seated([90, 80], prefill=1, decode=1, tensor_parallel_size=2)
    assert shared == again
    assert shared.kv_cache_gib == pytest.approx(2 * 0.8 * (80 / 2 - WEIGHTS_GIB / 2))
    asked: dict[str, Any] = {"prefill": 1, "decode": 0, "tensor_parallel_size": 2}
    assert seated([4, 4], kv_cache_gib=3.4, **asked) == [WorkerPlan("cuda:0", 3.4)]
    with pytest.raises(ConfigError, match=r"do not fit into the 4\.0 GiB of cuda:0"):
        seated([4, 4], kv_cache_gib=8.0, **asked)
    latent = dataclasses.replace(NEEDS, planes=1)
    with pytest.raises(ConfigError, match=r"do not fit into the 4\.0 GiB of cuda:0"):
        plan_workers(ServeSettings(kv_cache_gib=3.4, **asked), [latent], [4 * GIB] * 2)


def test_those_that_share_a_gpu_have_equal_parts_less_their_weights():
    shared, alone, again = seated([80, 80], prefill=1, decode=2)
    assert shared == again
    assert shared.kv_cache_gib == pytest.approx(0.8 * (80 / 2 - WEIGHTS_GIB))
    assert alone.kv_cache_gib == 0, "alone it takes what is free, as ever"
    assert 2 * (shared.kv_cache_gib + WEIGHTS_GIB) < 80


def test_a_size_that_was_asked_for_stays_and_is_checked():
    assert seated([80], prefill=1, decode=1, kv_cache_gib=30.0) == [WorkerPlan("cuda:0", 30.0)] * 2
    with pytest.raises(
        ConfigError, match=r"2 times 4.00 GiB of weights and 35 GiB of KV pool do not fit into the 80.0 GiB"
    ):
        seated([80], prefill=1, decode=1, kv_cache_gib=35.0)
    blocks = 35 * GIB // BLOCK
    with pytest.raises(ConfigError, match="lower --kv-blocks or start fewer workers"):
        seated([80], prefill=1, decode=1, kv_blocks=blocks)
    assert seated([80], prefill=0, decode=1, kv_blocks=blocks) == [WorkerPlan("cuda:0")]


def test_weights_alone_may_be_too_many():
    with pytest.raises(ConfigError, match=r"4 times 4.00 GiB of weights do not fit into the 15.0 GiB of cuda:0"):
        seated([15], prefill=2, decode=2)


@pytest.mark.parametrize(("device", "count"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), ("cuda:2", 2)])
def test_a_gpu_that_is_not_there_is_refused(device, count):
    with pytest.raises(ConfigError, match=f"--device {device}: no such GPU"):
        seated([80] * count, device=device)


@pytest.mark.parametrize(
    ("available", "settings", "remedy"),
    [
        (11, {}, None),
        (9.9, {}, "lower --kv-cache-gib to less than 0.9, or start fewer workers"),
        (7, {}, "start fewer workers, or take a smaller model"),
        (11, {"kv_cache_gib": 1.6}, "lower --kv-cache-gib to less than 1.5"),
        (11, {"kv_blocks": int(1.6 * GIB) // BLOCK}, "lower --kv-blocks, or"),
        (11, {"kv_blocks": int(1.4 * GIB) // BLOCK}, None),
        (11, {"kv_blocks": int(1.6 * GIB) // BLOCK, "kv_cache_dtype": "int8"}, None),
        (7, {"quantization": "int8"}, None),
        (11, {"dtype": "float32"}, "start fewer workers"),
        (6.1, {"share_weights": True}, None),
        (5.9, {"share_weights": True}, "--kv-cache-gib to less than 0.9"),
        (11, {"share_weights": True, "dtype": "float32"}, "start fewer workers"),
        (9, {"share_weights": True, "model_impl": "transformers"}, "start fewer workers"),
        (9, {"share_weights": True, "kernels": "reference"}, "start fewer workers"),
    ],
)
def test_on_a_cpu_all_weights_and_pools_are_summed_up_first(monkeypatch, available, settings, remedy):
    monkeypatch.setattr("psutil.virtual_memory", lambda: types.SimpleNamespace(available=int(available * GIB)))
    monkeypatch.setattr("kvferry.cli.resource_plan._kernels_are_compiled", lambda: True)
    wanted = ServeSettings(**{"device": "cpu", "prefill": 1, "decode": 1, "share_weights": False, **settings})
    places = plan_workers(wanted, [NEEDS], [])
    if remedy is None:
        assert "2 times" in require_memory(wanted, [NEEDS], places)
        return
    with pytest.raises(ConfigError) as caught:
        require_memory(wanted, [NEEDS], places)
    assert remedy in caught.value.message
    assert "\n" not in caught.value.message


def test_experts_that_transformers_loads_are_counted_for_each_worker(monkeypatch):
    """They are not in the one copy: with it they would seem to fit."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: types.SimpleNamespace(available=7 * GIB))
    monkeypatch.setattr("kvferry.cli.resource_plan._kernels_are_compiled", lambda: True)
    settings = ServeSettings(device="cpu", prefill=1, decode=1)
    dense = dataclasses.replace(NEEDS.dense, active=float(NEEDS.dense.weights))
    for needs in (NEEDS, dataclasses.replace(NEEDS, own=False, dense=dense)):
        assert require_memory(settings, [needs], plan_workers(settings, [needs], [])).startswith("1 time 4.00 GiB")
    incompatible = [dataclasses.replace(NEEDS, own=False)]
    with pytest.raises(ConfigError, match=r"2 times 4\.00 GiB of weights"):
        require_memory(settings, incompatible, plan_workers(settings, incompatible, []))


SMALL = dataclasses.replace(NEEDS, dense=WeightCount(weights=GIB // 2, plain=GIB // 2, active=1.0))
"""A model of 1 GiB."""


@pytest.mark.parametrize(
    ("settings", "gib"),
    [
        ({}, 1.0),
        ({"elastic": True}, 3.0),
        ({"kv_blocks": 256}, 1.0 + 256 * BLOCK / GIB),
    ],
)
def test_what_drafts_is_counted_where_it_may_run(monkeypatch, settings, gib):
    monkeypatch.setattr("psutil.virtual_memory", lambda: types.SimpleNamespace(available=99 * GIB))
    monkeypatch.setattr(resource_plan, "resolve", lambda name, weights: name)
    monkeypatch.setattr(resource_plan, "needs_of", lambda source: SMALL)
    wanted = ServeSettings(device="cpu", prefill=2, decode=1, speculative_model="small", **settings)
    assert f", {gib:.2f} GiB for the draft model" in require_memory(wanted, [NEEDS], plan_workers(wanted, [NEEDS], []))


def test_on_a_gpu_what_drafts_has_room_beside_the_pools(monkeypatch):
    monkeypatch.setattr(resource_plan, "resolve", lambda name, weights: name)
    monkeypatch.setattr(resource_plan, "needs_of", lambda source: SMALL)
    plain, drafting = (seated([80], prefill=1, decode=1, speculative_model=name) for name in ("", "small"))
    assert plain[1].kv_cache_gib - drafting[1].kv_cache_gib == pytest.approx(0.8 * 1)


def test_workers_of_several_models_sit_one_model_after_the_other():
    settings = ServeSettings(prefill=1, decode=2)
    places = plan_workers(settings, [NEEDS, SMALL], [80 * GIB] * 4)
    assert [plan.device for plan in places] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:0", "cuda:1"]
    assert {place.kv_cache_gib for place in places[2:4]} == {0}, "alone they take what is free"
    shared = pytest.approx(0.8 * (80 - WEIGHTS_GIB - 1) / 2)
    assert [place.kv_cache_gib for place in (places[0], places[4])] == [shared, shared]


def test_a_large_model_may_share_a_gpu_with_a_small_one():
    settings = ServeSettings(prefill=0, decode=1)
    large, small = plan_workers(settings, [NEEDS, SMALL], [6 * GIB])
    assert large == small == WorkerPlan("cuda:0", 0.4)
    with pytest.raises(
        ConfigError, match=r"4.00 GiB of weights, 1.00 GiB of weights do not fit into the 4.9 GiB of cuda:0"
    ):
        plan_workers(settings, [NEEDS, SMALL], [int(4.9 * GIB)])


def test_on_a_cpu_all_models_are_summed_up(monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: types.SimpleNamespace(available=int(14.1 * GIB)))
    settings = ServeSettings(device="cpu", share_weights=False)
    places = plan_workers(settings, [NEEDS, SMALL], [])
    assert places == [WorkerPlan("cpu")] * 4
    summary = require_memory(settings, [NEEDS, SMALL], places)
    assert "2 times 4.00 GiB of weights and 2 times 1 GiB of KV pool, 2 times 1.00 GiB of weights" in summary
    with pytest.raises(ConfigError, match=r"lower --kv-cache-gib to less than 1.0, or start fewer workers"):
        require_memory(dataclasses.replace(settings, kv_cache_gib=1.1), [NEEDS, SMALL], places)


def test_pools_on_gpus_take_no_memory_of_the_machine(monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: types.SimpleNamespace(available=GIB))
    settings = ServeSettings()
    assert "on cuda:0, cuda:1" in require_memory(settings, [NEEDS], plan_workers(settings, [NEEDS], [80 * GIB] * 2))


def test_block_formats_are_smaller_only_where_they_run_as_stored():
    half = WeightCount(weights=1000, stored_bytes=500.0, plain=100, coded_bytes=300.0, coded=600)
    needs = ModelNeeds(half, WeightCount(), WeightCount(), 1, 1, 8, 8, 64)
    assert weight_bytes(ServeSettings(), needs, "cpu") == 700
    assert weight_bytes(ServeSettings(), needs, "cuda:0") == 1100
    assert weight_bytes(ServeSettings(kernels="reference"), needs, "cuda:0") == 2000
    assert weight_bytes(ServeSettings(quantization="int8"), needs, "cuda:0") == 1000
    assert weight_bytes(ServeSettings(quantization="none"), needs, "cpu") == 2000
    assert weight_bytes(ServeSettings(dtype="float32"), needs, "cpu") == 4000
    assert weight_bytes(ServeSettings(dtype="float16"), needs, "cuda:0") == 2000
    cases: list[dict[str, Any]] = [{}, {"dtype": "float16"}, {"kv_cache_dtype": "int8"}]
    assert [kv_dtype(ServeSettings(**given)) for given in cases] == [
        "bfloat16",
        "float16",
        "int8",
    ]
