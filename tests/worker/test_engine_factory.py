"""Sizing a node: what does not fit is refused with the flag to change."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from kvferry.engine.models.base import Model, ModelInfo
from kvferry.kernels.capabilities import Capabilities
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.layout import KVLayout
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker.engine_factory import choose_device, longest_sequence, refuse_expandable_segments, step_limits
from kvferry.worker.engine_parts import EngineParts, describe
from kvferry.worker.kv_format import kv_format

CPU = torch.device("cpu")
LAYOUT = KVLayout(2, 2, 8, "float32", 4)
INFO = ModelInfo("m", "r", 2, 2, 8, 100, 64)


def test_sequences_fit_model_and_pool() -> None:
    assert longest_sequence(WorkerSettings(), INFO, 100) == 64
    assert longest_sequence(WorkerSettings(), INFO, 2) == 32
    assert longest_sequence(WorkerSettings(max_model_len=20), INFO, 2) == 20
    with pytest.raises(ConfigError, match="--max-model-len"):
        longest_sequence(WorkerSettings(max_model_len=65), INFO, 100)
    with pytest.raises(ConfigError, match="--kv-cache-gib"):
        longest_sequence(WorkerSettings(max_model_len=40), INFO, 2)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_that_other_processes_cannot_open_is_refused(name: str) -> None:
    refuse_expandable_segments({name: "max_split_size_mb:128,expandable_segments:False"})
    with pytest.raises(ConfigError, match=name):
        refuse_expandable_segments({name: "max_split_size_mb:128, expandable_segments: True"})


def test_a_step_has_room_for_every_running_request_and_a_block_of_a_prompt() -> None:
    limits = step_limits(WorkerSettings(max_num_seqs=500, max_num_batched_tokens=100, block_size=8), CPU)
    assert (limits.max_num_batched_tokens, limits.max_num_seqs) == (508, 500)
    for instruction_set, budget in (("amx", 512), ("avx512_bf16", 256), ("", 256)):
        limits = step_limits(WorkerSettings(), CPU, instruction_set)
        assert (limits.max_num_batched_tokens, limits.max_prefill_tokens_while_decoding) == (budget, 256)


def of_heads(dim: int, unit: int) -> Model:
    """A model with such heads, on kernels that keep int8 of multiples of the unit."""
    ops = SimpleNamespace(name="triton", capabilities=Capabilities(unit=unit))
    return cast(Model, SimpleNamespace(info=replace(INFO, head_dim=dim), ops=ops))


def test_int8_kv_is_refused_where_no_kernel_reads_it() -> None:
    int8 = WorkerSettings(kv_cache_dtype="int8")
    assert kv_format(int8, of_heads(20, 4), None) == torch.int8
    assert kv_format(int8, of_heads(6, 1)) == torch.int8
    assert kv_format(WorkerSettings(), of_heads(6, 4)) is None
    for models in ((of_heads(6, 4),), (of_heads(8, 4), of_heads(6, 4))):
        with pytest.raises(ConfigError, match="multiples of 4 on triton kernels") as raised:
            kv_format(int8, *models)
        assert raised.value.param == "kv_cache_dtype"


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_fp8_is_one_format_by_two_names_and_not_batch_invariant(name: str) -> None:
    assert kv_format(WorkerSettings(kv_cache_dtype=name), of_heads(20, 4)) == torch.float8_e4m3fn
    with pytest.raises(ConfigError, match="multiples of 4 on triton kernels"):
        kv_format(WorkerSettings(kv_cache_dtype=name), of_heads(6, 4))
    with pytest.raises(ConfigError, match=f"batch_invariant is not supported with kv_cache_dtype {name}"):
        kv_format(WorkerSettings(kv_cache_dtype=name, batch_invariant=True), of_heads(20, 1))


def test_an_unknown_device_is_refused() -> None:
    for name in ("abacus", "cuda:0" if not torch.cuda.is_available() else "abacus"):
        with pytest.raises(ConfigError, match="cpu"):
            choose_device(name)


def test_a_node_tells_a_person_where_it_computes_and_how_large_its_pool_is() -> None:
    engine = SimpleNamespace(
        runner=SimpleNamespace(model=SimpleNamespace(ops=None)),
        pool=SimpleNamespace(num_blocks=2**22),
        config=SimpleNamespace(limits=SimpleNamespace(whole=False)),
    )
    parts = SimpleNamespace(
        engine=engine, layout=LAYOUT, kv=torch.zeros(1), info=SimpleNamespace(name="m"), ranks=None, max_model_len=64
    )
    facts = describe(cast(EngineParts, parts))
    assert facts == {
        "model": "m",
        "device": f"cpu, threads: {torch.get_num_threads()}",
        "kv_pool": "4.00 GiB, 16777216 tokens",
    }
    parts.ranks = SimpleNamespace(part=SimpleNamespace(group=SimpleNamespace(ranks=2)))
    assert describe(cast(EngineParts, parts))["device"] == f"cpu, threads: 2 x {torch.get_num_threads()}"


def test_a_gpu_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert choose_device("auto").type == choose_device("cuda").type == "cuda"
    with pytest.raises(ConfigError, match="there is no cuda:2; the last GPU is cuda:1"):
        choose_device("cuda:2")
