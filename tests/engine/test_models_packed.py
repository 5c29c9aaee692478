"""Models whose dense layers run as stored: GGUF's block formats and int8, against the same weights in float32."""

from __future__ import annotations

import gguf
import pytest
import torch

from kvferry.engine.models import load_model
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError
from tests.engine.test_models_gguf import CPU, Kind, write_gguf
from tests.engine.tiny_models import chunked_logits, family, save_tiny, tokens_for

pytestmark = pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension")


def load(path, quantization="auto", dtype=torch.bfloat16, ops=None, **extra):
    ops = ops or CpuOps(1)
    return load_model(resolve(str(path)), device=CPU, dtype=dtype, ops=ops, quantization=quantization, **extra)


def correlation(model, wanted) -> float:
    tokens = tokens_for(40)
    found = [chunked_logits(each, tokens, [23, 17]).flatten() for each in (model, wanted)]
    return float(torch.corrcoef(torch.stack(found))[0, 1])


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Heads of 32 and grouped: rows of q and k are reordered in a GGUF of this family."""
    path = tmp_path_factory.mktemp("packed") / "hf"
    save_tiny(family("LlamaConfig", head_dim=32, tie_word_embeddings=True), path)
    return path


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_a_gguf_runs_as_stored(kind, llama, tmp_path):
    path = write_gguf(tmp_path / "q.gguf", llama, "llama", kind=kind)
    model, dequantised = load(path), load(path, "none")
    assert model.info.revision == f"{dequantised.info.revision}+{kind.name}"
    exact = load(path, dtype=torch.float32, ops=ReferenceOps())
    assert exact.info.revision == dequantised.info.revision
    assert correlation(model, exact) > 0.999
    assert correlation(dequantised, exact) > 0.999


def test_formats_of_one_file_may_differ(llama, tmp_path, monkeypatch):
    """As in files that keep v more precisely than q and k."""
    added = gguf.GGUFWriter.add_tensor

    def precise_v(writer, name, data, raw_dtype=None):
        if "attn_v" in name:
            data, raw_dtype = gguf.quantize(gguf.dequantize(data, Kind.Q4_0), Kind.Q8_0), Kind.Q8_0
        added(writer, name, data, raw_dtype=raw_dtype)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", precise_v)
    path = write_gguf(tmp_path / "mixed.gguf", llama, "llama", kind=Kind.Q4_0)
    model = load(path)
    assert model.info.revision.endswith("+Q4_0+Q8_0")
    assert correlation(model, load(path, dtype=torch.float32, ops=ReferenceOps())) > 0.999


def test_int8_is_near(llama):
    model, exact = load(llama, "int8"), load(llama, dtype=torch.float32, ops=ReferenceOps())
    assert model.info.revision == f"{exact.info.revision}+INT8"
    assert correlation(model, exact) > 0.998


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "experts"
    save_tiny(family("MixtralConfig", num_local_experts=4, num_experts_per_tok=2), path)
    return path


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0], ids=lambda kind: kind.name)
def test_experts_of_a_gguf_run_as_stored(kind, mixtral, tmp_path):
    fields = {"expert_count": 4, "expert_used_count": 2}
    path = write_gguf(tmp_path / "q.gguf", mixtral, "llama", kind=kind, fields=fields)
    model = load(path)
    assert model.info.revision.endswith(f"+{kind.name}")
    assert {linear.weights is not None for linear in model.dense_layers()} == {True}
    assert correlation(model, load(path, dtype=torch.float32, ops=ReferenceOps())) > 0.99


def test_int8_of_experts_is_near(mixtral):
    model, exact = load(mixtral, "int8"), load(mixtral, dtype=torch.float32, ops=ReferenceOps())
    assert model.info.revision == f"{exact.info.revision}+INT8"
    assert correlation(model, exact) > 0.99


def test_int8_is_refused_where_nothing_runs_it(llama):
    for wrong in ({"dtype": torch.float32}, {"ops": ReferenceOps()}):
        with pytest.raises(ConfigError, match="quantization int8 needs"):
            load(llama, "int8", **wrong)
