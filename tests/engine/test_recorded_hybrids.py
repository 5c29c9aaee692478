"""Recorded CPU steps of hybrid models: the same bits as their layers one by one, whatever the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.engine.models import load_model
from kvferry.engine.models.decoder import Decoder
from kvferry.kernels.cpu import CpuOps, instruction_sets
from kvferry.kernels.cpu.step import CpuStep
from kvferry.kernels.decoder_spec import DecoderForm
from kvferry.kernels.decoder_step import OneByOne
from kvferry.kernels.ops import Ops
from kvferry.model_files.source import resolve
from tests.engine.hybrid_gguf import Converter, Kind
from tests.engine.test_models_gguf_hybrid import granite
from tests.engine.tiny_hybrids import HYBRIDS
from tests.engine.tiny_models import Cache, save_tiny, tokens_for

SETS = instruction_sets()
RECORDED = ("lfm2", "lfm2-biased-wide", "qwen3.5", "qwen3.5-one-key-head", "granite4", "granite4-rope", "bamba")
pytestmark = pytest.mark.skipif(not SETS, reason="installed without the CPU extension")


class Layered(CpuOps):
    def record(self, form: DecoderForm, one_by_one: OneByOne) -> None:
        return None


def load(path: Path, ops: Ops, quantization: str) -> Decoder:
    model = load_model(
        resolve(str(path)), device=torch.device("cpu"), dtype=torch.bfloat16, ops=ops, quantization=quantization
    )
    assert isinstance(model, Decoder)
    return model


WHOLE = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 96,
    "shared_intermediate_size": 96,
    "block_auto_adjust_ff_dim": False,
}
"""Sizes that fill whole panels, as those of real models do."""


def saved(name: str, path: Path) -> Path:
    config = HYBRIDS[name]()
    for field, value in WHOLE.items():
        setattr(config, field, value)
    save_tiny(config, path)
    return path


def steps(model: Decoder) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return logits of two prompts, of their decodes with and without a third prompt beside them, and the states."""
    cache, found = Cache(model), []
    first, second, third = tokens_for(40, 1), tokens_for(30, 2), tokens_for(9, 3)
    found += cache.step({"a": first[:20], "b": second[:11]})
    for at in range(4):
        found += cache.step({"a": first[20 + at : 21 + at], "b": second[11 + at : 12 + at]})
    found += cache.step({"a": first[24:25], "b": second[15:16], "c": third})
    found += cache.step({"b": second[16:17]})
    return found, cache.states


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("name", RECORDED)
def test_decodes_equal_the_layers_one_by_one(name: str, quantization: str, tmp_path: Path) -> None:
    path = saved(name, tmp_path)
    recorded, layered = (load(path, ops(2, SETS[0]), quantization) for ops in (CpuOps, Layered))
    assert isinstance(recorded._step, CpuStep)
    (got, states), (wanted, expected) = steps(recorded), steps(layered)
    for logits, others in zip(got, wanted, strict=True):
        assert torch.equal(logits, others)
    assert torch.equal(states, expected)


def test_factors_of_results_are_replayed(tmp_path: Path) -> None:
    """Stored blocks cannot take up a multiplier, so the layers' results do."""
    converter = Converter(saved("granite4", tmp_path / "hf"), "granitehybrid")
    path = converter.write(tmp_path / "q.gguf", granite(converter.config), Kind.Q8_0)
    recorded, layered = (load(path, ops(2), "auto") for ops in (CpuOps, Layered))
    assert isinstance(recorded._step, CpuStep)
    assert all(map(torch.equal, steps(recorded)[0], steps(layered)[0]))


@pytest.mark.parametrize("name", ["qwen3.5", "granite4"])
def test_next_tokens_are_the_best_logits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(saved(name, tmp_path), CpuOps(2), "none")
    cache = Cache(model)
    cache.step({"a": tokens_for(20)})
    asked: list[Any] = []

    def forward(tokens: torch.Tensor, kv: torch.Tensor, plan: Any, wanted: Any, halfway: Any) -> torch.Tensor:
        asked.append(model.next_logits(tokens, kv, plan))
        return Decoder.forward(model, tokens, kv, plan)

    monkeypatch.setattr(model, "forward", forward)
    (logits,) = cache.step({"a": tokens_for(1, 5)})
    assert torch.equal(asked[0].values, logits)
    assert asked[0].best == logits.argmax(-1).tolist()


def test_a_row_outside_the_states_is_refused_and_leaves_nothing_bound(tmp_path: Path) -> None:
    model = load(saved("lfm2", tmp_path), CpuOps(1), "none")
    cache = Cache(model)
    cache.step({"a": tokens_for(5)})
    cache.rows["a"] = 99, 98
    with pytest.raises(ValueError, match="outside the states"):
        cache.step({"a": tokens_for(1)})
