"""Adapters on GGUF files: made against transformers' order of q and k rows, which the file stores in another."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from kvferry.engine.models import load_model
from kvferry.engine.models.decoder import Decoder
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.source import resolve
from tests.adapter_files import merge, save_adapter
from tests.engine.test_adapters import adapter_of, hf, wearing
from tests.engine.test_models_gguf import Kind, write_gguf
from tests.engine.tiny_models import BLOCK, chunked_logits, family, save_tiny, tokens_for
from tests.transformers_demo import load_demo

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")
packed_only = pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension")


def load(path: str, dtype: torch.dtype = torch.float32, ops: Ops | None = None, quantization: str = "none") -> Decoder:
    model = load_model(resolve(path), device=CPU, dtype=dtype, ops=ops or ReferenceOps(), quantization=quantization)
    assert isinstance(model, Decoder)
    return model


def correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([first.flatten().float(), second.flatten().float()]))[0, 1])


@pytest.mark.parametrize("targets", [("q_proj",), ("k_proj",), ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")])
def test_rows_of_q_and_k_are_in_the_order_of_the_adapter(targets: tuple[str, ...], tmp_path: Path) -> None:
    """Grouped heads of 32, so that a wrong order, or one of q's heads for k, changes the logits."""
    save_tiny(family("LlamaConfig", head_dim=32), tmp_path / "hf")
    model = load(str(write_gguf(tmp_path / "tiny.gguf", tmp_path / "hf", "llama")))
    path = save_adapter(tmp_path / "a", hf(tmp_path / "hf"), targets=targets)
    tokens = tokens_for(40)
    plain = chunked_logits(model, tokens, [23, 17])
    with torch.inference_mode():
        wanted = merge(hf(tmp_path / "hf"), path)(input_ids=tokens[None]).logits[0]
    got = chunked_logits(wearing(model, adapter_of(path, model)), tokens, [23, 17])
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)
    assert (got - plain).abs().max() > 0.1, "the adapter must matter"


@packed_only
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0], ids=lambda kind: kind.name)
def test_rows_of_packed_layers_are_too(kind: Kind, tmp_path: Path) -> None:
    save_tiny(family("LlamaConfig", head_dim=32), tmp_path / "hf")
    path = save_adapter(tmp_path / "a", hf(tmp_path / "hf"))
    file = str(write_gguf(tmp_path / "tiny.gguf", tmp_path / "hf", "llama", kind=kind))
    exact, packed = load(file), load(file, torch.bfloat16, CpuOps(1), "auto")
    assert packed.info.revision.endswith(kind.name)
    tokens = tokens_for(40)
    logits = [chunked_logits(wearing(m, adapter_of(path, m)), tokens, [23, 17]) for m in (exact, packed)]
    assert correlation(*logits) > 0.995


TOKENS = torch.tensor([1, 4093, 198, 1780, 314, 253, 1165, 42, 2, 198, 1, 520, 9531, 198, 504, 3575, 282, 4649])


@pytest.fixture(scope="module")
def demo() -> torch.nn.Module:
    """The demo model as transformers reads its file: dequantised, in its own order of rows."""
    torch.set_num_threads(2)
    loaded: torch.nn.Module = load_demo(attn_implementation="eager")
    return loaded


def with_and_without(model: Decoder, path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    plain = chunked_logits(model, TOKENS, [BLOCK, 1, 9])
    return plain, chunked_logits(wearing(model, adapter_of(path, model)), TOKENS, [BLOCK, 1, 9])


@torch.inference_mode()
def wanted_of(demo: torch.nn.Module, path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits without the adapter and with it merged."""
    merged = merge(copy.deepcopy(demo), path)
    return demo(input_ids=TOKENS[None]).logits[0], merged(input_ids=TOKENS[None]).logits[0]


@pytest.mark.slow
def test_the_demo_model_with_an_adapter_equals_transformers_with_it_merged(
    demo: torch.nn.Module, tmp_path: Path
) -> None:
    path = save_adapter(tmp_path / "a", demo, size=0.04)
    plain, merged = wanted_of(demo, path)
    _, got = with_and_without(load("smollm2"), path)
    torch.testing.assert_close(got, merged, rtol=1e-3, atol=1e-3)
    assert torch.equal(got.argmax(-1), merged.argmax(-1))
    assert (merged - plain).abs().max() > 1, "the adapter must matter"


@packed_only
@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_the_demo_model_as_it_is_served_too(quantization: str, demo: torch.nn.Module, tmp_path: Path) -> None:
    """bfloat16, and int8 activations where weights are packed, move logits with an adapter as they do without. What
    an adapter of q and k alone adds is large against that noise, and is another thing with their rows in the file's
    order."""
    path = save_adapter(tmp_path / "a", demo, targets=("q_proj", "k_proj"), size=0.1)
    plain, merged = wanted_of(demo, path)
    before, after = with_and_without(load("smollm2", torch.bfloat16, CpuOps(2), quantization), path)
    assert correlation(after - before, merged - plain) > 0.97
    assert (after - merged).std() < 2 * (before - plain).std()
