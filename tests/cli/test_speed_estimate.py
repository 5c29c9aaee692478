"""What a model would do on a machine whose limits are known, and how limits are measured."""

from __future__ import annotations

import json

import pytest
import torch

from kvferry.cli import doctor, speed_estimate
from kvferry.cli.doctor import all_checks
from kvferry.cli.resource_plan import GIB, WorkerPlan
from kvferry.cli.speed_estimate import Limits, expected, measure
from kvferry.model_files.memory_needs import ModelNeeds, config_needs
from kvferry.model_files.weight_counts import WeightCount
from kvferry.protocol.settings import ServeSettings

DENSE, EMBEDDING = 6_000_000_000, 500_000_000
NEEDS = ModelNeeds(
    dense=WeightCount(weights=DENSE, stored_bytes=DENSE / 2, active=DENSE),
    embedding=WeightCount(weights=EMBEDDING, plain=EMBEDDING, active=EMBEDDING),
    head=WeightCount(),
    layers=32,
    kv_heads=8,
    head_dim=128,
    query_size=4096,
    max_model_len=8192,
)
LIMITS = Limits(read=50e9, multiply=1e12)


def test_decode_is_bound_by_the_weights_that_a_step_reads():
    for settings, step in (
        (ServeSettings(), DENSE / 2 + 2 * EMBEDDING),
        (ServeSettings(quantization="none"), 2 * DENSE + 2 * EMBEDDING),
        (ServeSettings(quantization="int8"), DENSE + 2 * EMBEDDING),
        (ServeSettings(dtype="float32"), 4 * DENSE + 4 * EMBEDDING),
    ):
        assert expected(settings, NEEDS, WorkerPlan("cpu"), 0, LIMITS).tokens == pytest.approx(50e9 / step)


def test_prefill_is_bound_by_arithmetic():
    found = expected(ServeSettings(), NEEDS, WorkerPlan("cpu"), 0, LIMITS)
    attention = 2 * 32 * 4096 * 2049
    assert found.prompt_tokens == pytest.approx(1e12 / (2 * DENSE + attention + 2 * EMBEDDING / 2048))


@pytest.mark.parametrize(
    ("settings", "plan", "gpu", "pool"),
    [
        ({}, WorkerPlan("cpu"), 0, GIB),
        ({"kv_cache_gib": 2.0}, WorkerPlan("cpu", 2.0), 0, 2 * GIB),
        ({"kv_blocks": 100}, WorkerPlan("cpu"), 0, 100 * 16 * 131072),
        ({}, WorkerPlan("cuda:1", 7.5), 80 * GIB, 7.5 * GIB),
        ({}, WorkerPlan("cuda:0"), 80 * GIB, 0.8 * (80 * GIB - 2 * (DENSE + EMBEDDING))),
    ],
)
def test_the_pool_holds_so_many_tokens(settings, plan, gpu, pool):
    found = expected(ServeSettings(**settings), NEEDS, plan, gpu, LIMITS)
    assert found.kv_per_token == 131072
    assert found.pool == pytest.approx(pool)
    assert found.pool_tokens == int(pool // 131072)


def test_it_reads_as_one_line():
    text = expected(ServeSettings(), NEEDS, WorkerPlan("cpu"), 0, LIMITS).describe(LIMITS)
    assert text == (
        "up to 12 tokens/s for one stream and 80 prompt tokens/s, by 50 GB/s and 1,000 GFLOP/s measured here; "
        "weights 3.73 GiB; KV 128.0 KiB a token, so 1.0 GiB of pool hold 8,200"
    )


def test_the_machine_is_measured_with_and_without_the_compiled_kernels(monkeypatch):
    monkeypatch.setattr(speed_estimate, "READ_BYTES", 16 << 20)
    monkeypatch.setattr(speed_estimate, "ROUNDS", 20_000)
    monkeypatch.setattr(speed_estimate, "MEASURE_S", 0.05)
    monkeypatch.setattr(speed_estimate, "SIDE", {"cpu": 256})
    threads = torch.get_num_threads()
    try:
        found = [measure("cpu", 1)]
        monkeypatch.setattr("kvferry.kernels.cpu.extension.instruction_set", lambda: None)
        found.append(measure("cpu", 1))
    finally:
        torch.set_num_threads(threads)
    for limits in found:
        assert 1e8 < limits.read < 1e13
        assert 1e8 < limits.multiply < 1e15


def test_the_doctor_asks_for_no_weights(monkeypatch, tmp_path):
    """A hub id's config is enough: what was resolved holds no weights."""
    config = {"model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = []

    def download(repo, patterns):
        asked.append(patterns)
        return tmp_path

    monkeypatch.setattr("kvferry.model_files.source.download", download)
    monkeypatch.setattr("kvferry.cli.speed_estimate.measure", lambda device, threads: LIMITS)
    monkeypatch.setattr(doctor, "gpus", list)
    settings = ServeSettings(model=("org/model",), threads=1)
    results = list(all_checks(settings, [(name, getattr(doctor, name)) for name in ("model", "memory", "speed")]))
    assert [result.level for result in results] == ["ok"] * 3, results
    assert not any("*.safetensors" in patterns for patterns in asked)
    tokens = LIMITS.read / config_needs(config).step_bytes(2)
    assert f"up to {float(f'{tokens:.2g}'):,.0f} tokens/s" in results[2].found


def test_on_a_gpu_the_doctor_tells_of_that_gpu(monkeypatch):
    monkeypatch.setattr(doctor, "gpus", lambda: [80 * GIB, 40 * GIB])
    measured = []
    monkeypatch.setattr("kvferry.cli.speed_estimate.measure", lambda *given: measured.append(given) or LIMITS)
    (result,) = all_checks(ServeSettings(threads=3), [("speed", doctor.speed)])
    assert measured == [("cuda:1", 3)]
    assert "31.9 GiB of pool" in result.found
