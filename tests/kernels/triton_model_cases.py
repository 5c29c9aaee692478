"""Whole models whose layers run as they are stored. Collected by test_triton_products.py; on a GPU the kernels run for
real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.engine.models import load_model
from kvferry.engine.models.base import Model
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.reference import ReferenceOps
from kvferry.kernels.triton import TritonOps
from kvferry.model_files.source import resolve
from tests.engine.quantised_files import awq, fp8, gptq, packed, quantise
from tests.engine.test_models_gguf import Kind, write_gguf
from tests.engine.test_models_quantised import AWQ, FP8, GPTQ, INT4, compressed
from tests.engine.tiny_models import COHERE, chunked_logits, family, save_tiny, tokens_for
from tests.kernels.interpreted import DEVICE, bfloat16_products  # noqa: F401
from tests.kernels.tape import capture

CASES = {
    "gptq-ordered": (gptq(4, 32, True, ordered=True), GPTQ | {"desc_act": True}, "W4A16"),
    "awq": (awq(32), AWQ, "W4A16"),
    "int4": (packed(4, 32, True), compressed("pack-quantized", **INT4), "W4A16"),
    "fp8-block": (fp8("block", "weight_scale_inv"), FP8 | {"weight_block_size": [32, 64]}, "FP8"),
    "gptq-16": (gptq(4, 16, True), GPTQ | {"group_size": 16}, "W4A16"),
    "gptq-8": (gptq(4, 8, True), GPTQ | {"group_size": 8}, ""),
}
PAIRS = [("llama", name) for name in CASES] + [("cohere", "fp8-block"), ("cohere", "awq")]
FAMILIES = {"llama": ("LlamaConfig", {}), "cohere": ("CohereConfig", COHERE)}
"""Cohere's rotation pairs neighbours: rows of q and k are reordered, and so are their scales."""


def load(path: Path, dtype: torch.dtype, **how: Any) -> Model:
    given: dict[str, Any] = {"device": torch.device(DEVICE), "quantization": "auto"} | how
    found: Model = load_model(resolve(str(path)), dtype=dtype, **given)
    return found


def correlations(model: Model, *wanted: Model, cache: torch.dtype | None = None) -> list[float]:
    """With each of the others, of a prompt and of steps that are captured and replayed; cache: of the first model,
    which the interpreter runs once for all."""
    made = ((model, cache), *((each, None) for each in wanted))
    found = [chunked_logits(each, tokens_for(20), [18, 1, 1], dtype).flatten() for each, dtype in made]
    return [float(number) for number in torch.corrcoef(torch.stack(found))[0, 1:]]


def correlation(model: Model, wanted: Model, cache: torch.dtype | None = None) -> float:
    (found,) = correlations(model, wanted, cache=cache)
    return found


@pytest.mark.parametrize(("form", "name"), PAIRS)
def test_models_run_as_they_are_stored(form: str, name: str, tmp_path: Path) -> None:
    layer, config, kind = CASES[name]
    given, extra = FAMILIES[form]
    save_tiny(family(given, num_hidden_layers=1, head_dim=32, intermediate_size=128, **extra), tmp_path / "plain")
    quantise(tmp_path / "plain", tmp_path / "quantised", tmp_path / "values", layer, config)
    exact = load(tmp_path / "values", torch.float32, ops=ReferenceOps())
    stored = load(tmp_path / "quantised", torch.bfloat16, ops=TritonOps(4, capture()))
    dequantised = load(tmp_path / "quantised", torch.bfloat16, ops=ReferenceOps(), quantization="none")
    assert stored.info.revision == "+".join((dequantised.info.revision, *([kind] if kind else [])))
    assert correlation(stored, exact) > 0.995


@pytest.mark.parametrize(
    ("kind", "forms"), [("Q8_0", "W8A16"), ("Q4_0", "W4A16"), ("Q4_1", "W4A16"), ("Q5_0", "W6A16"), ("Q5_1", "W6A16")]
)
def test_a_gguf_runs_as_it_is_stored(kind: str, forms: str, tmp_path: Path) -> None:
    """Of a family whose files have rows of q and k in another order."""
    save_tiny(family("LlamaConfig", num_hidden_layers=1, head_dim=32, intermediate_size=128), tmp_path / "plain")
    path = write_gguf(tmp_path / "a.gguf", tmp_path / "plain", "llama", kind=Kind[kind])
    exact = load(path, torch.float32, ops=ReferenceOps())
    stored = load(path, torch.bfloat16, ops=TritonOps(4, capture()))
    assert stored.info.revision == f"{exact.info.revision}+{forms}"
    compared = [exact]
    if instruction_set() is not None:
        compared.append(load(path, torch.bfloat16, ops=CpuOps(1), device=torch.device("cpu")))
    assert min(correlations(stored, *compared)) > 0.995


def test_experts_of_a_gguf_run_as_they_are_stored(tmp_path: Path) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    save_tiny(family("MixtralConfig", num_hidden_layers=1, **experts), tmp_path / "plain")
    fields = {"expert_count": 4, "expert_used_count": 2}
    path = write_gguf(tmp_path / "a.gguf", tmp_path / "plain", "llama", kind=Kind.Q4_1, fields=fields)
    stored = load(path, torch.bfloat16, ops=TritonOps(4))
    assert stored.info.revision.endswith("+W4A16")
    assert correlation(stored, load(path, torch.float32, ops=ReferenceOps())) > 0.99


def test_int8_of_any_model_is_near(tmp_path: Path) -> None:
    save_tiny(family("LlamaConfig", num_hidden_layers=1, head_dim=32), tmp_path / "plain")
    model = load(tmp_path / "plain", torch.bfloat16, ops=TritonOps(4, capture()), quantization="int8")
    assert model.info.revision.endswith("+W8A16")
    assert correlation(model, load(tmp_path / "plain", torch.float32, ops=ReferenceOps())) > 0.995


@pytest.mark.parametrize(("cache", "near"), [(torch.int8, 0.999), (torch.float8_e4m3fn, 0.998)])
def test_a_cache_in_8_bits_is_near(cache: torch.dtype, near: float, tmp_path: Path) -> None:
    save_tiny(family("LlamaConfig", num_hidden_layers=1, head_dim=16), tmp_path / "plain")
    model = load(tmp_path / "plain", torch.float32, ops=TritonOps(4, capture()))
    exact = load(tmp_path / "plain", torch.float32, ops=ReferenceOps())
    assert near < correlation(model, exact, cache) < 1 - 1e-7
