"""Checkpoints that hold all experts of a layer in one tensor: gpt-oss's in MXFP4 against the values that transformers
finds in them, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.engine.models import load_model
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.models.directory import SafetensorsWeights
from kvferry.engine.models.families import FAMILIES
from kvferry.engine.models.implementation import OWN, implementation_of
from kvferry.engine.models.stacked import StackedWeights
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.memory_needs import model_needs
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError
from tests.engine.test_models_gguf import same_logits
from tests.engine.test_models_packed import CPU, correlation
from tests.engine.tiny_models import OURS, expect_equal_logits, oracle_logits, save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")
STACKS = ("gate_up_proj", "down_proj")


def load(path: Path, ops: Ops | None = None, dtype: torch.dtype = torch.float32, quantization: str = "auto") -> Decoder:
    model = load_model(
        resolve(str(path)), device=CPU, dtype=dtype, ops=ops or ReferenceOps(), quantization=quantization
    )
    assert isinstance(model, Decoder)
    return model


def stacks_of(path: Path) -> StackedWeights:
    names = FAMILIES["gpt_oss"].experts
    assert names is not None
    assert names.stack is not None
    return StackedWeights(SafetensorsWeights([path / "model.safetensors"]), names, names.stack)


def edit(path: Path, **values: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | values))


def rewrite(path: Path, **changed: torch.Tensor | None) -> None:
    """Layer 0's tensors of the experts, by their last names; None: there is none."""
    tensors = load_file(path / "model.safetensors")
    for name, tensor in changed.items():
        del tensors[f"model.layers.0.mlp.experts.{name}"]
        if tensor is not None:
            tensors[f"model.layers.0.mlp.experts.{name}"] = tensor
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    save_tiny(OURS["gpt-oss"](), tmp_path / "plain")
    return tmp_path / "plain"


def in_mxfp4(plain: Path) -> Path:
    """A checkpoint of random codes, and beside it, under `values`, what transformers makes of them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = load_file(plain / "model.safetensors")
    written, values, numbers = dict(tensors), dict(tensors), torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(STACKS)]:
        experts, inputs, outputs = tensors[name].shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=numbers, dtype=torch.uint8)
        scales = torch.randint(119, 126, blocks.shape[:-1], generator=numbers, dtype=torch.uint8)
        del written[name]
        written |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert values[name].shape == tensors[name].shape
    for folder, each in (("mxfp4", written), ("values", values)):
        (plain.parent / folder).mkdir()
        save_file(each, plain.parent / folder / "model.safetensors", {"format": "pt"})
        (plain.parent / folder / "config.json").write_text((plain / "config.json").read_text())
    edit(plain.parent / "mxfp4", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return plain.parent / "mxfp4"


@pytest.fixture
def mxfp4(plain: Path) -> Path:
    return in_mxfp4(plain)


def test_codes_are_the_values_that_transformers_finds(mxfp4: Path) -> None:
    values = mxfp4.parent / "values"
    expect_equal_logits(load(values), lambda tokens: oracle_logits(values, tokens))
    same_logits(load(mxfp4), values, tolerance=1e-5)
    assert load(mxfp4, dtype=torch.bfloat16).info.revision == resolve(str(mxfp4)).revision


@pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension")
def test_codes_run_as_integers_of_the_same_values(mxfp4: Path) -> None:
    model, exact = load(mxfp4, CpuOps(1), torch.bfloat16), load(mxfp4)
    assert model.info.revision == f"{exact.info.revision}+Q5_0"
    assert correlation(model, exact) > 0.99
    assert correlation(load(mxfp4, CpuOps(1), torch.bfloat16, "none"), exact) > 0.99
    weights = stacks_of(mxfp4)
    for name, shape in (("gate_proj", (96, 64)), ("up_proj", (96, 64)), ("down_proj", (64, 96))):
        name = f"model.layers.1.mlp.experts.4.{name}.weight"
        codes, wanted = weights.stored(name, shape), torch.empty(shape, dtype=torch.bfloat16)
        weights.read(name, wanted)
        assert codes is not None
        linear = CpuOps(1).packed([codes], shape[1])
        assert linear is not None
        assert torch.equal(linear.rows(torch.arange(shape[0])), wanted)


def test_gate_and_up_take_turns(plain: Path) -> None:
    weights = stacks_of(plain)
    stacks = load_file(plain / "model.safetensors")
    stack = stacks["model.layers.2.mlp.experts.gate_up_proj"]
    for first, part in enumerate(("gate_proj", "up_proj")):
        weight, bias = torch.empty(96, 64), torch.empty(96)
        weights.read(f"model.layers.2.mlp.experts.5.{part}.weight", weight)
        weights.read(f"model.layers.2.mlp.experts.5.{part}.bias", bias)
        assert torch.equal(weight, stack[5, :, first::2].t())
        assert torch.equal(bias, stacks["model.layers.2.mlp.experts.gate_up_proj_bias"][5, first::2])
    assert weights.stored("model.layers.2.mlp.experts.5.gate_proj.weight", (96, 64)) is None


def test_memory_and_way_are_known_beforehand(plain: Path, mxfp4: Path) -> None:
    needs, whole = model_needs(resolve(str(mxfp4))), model_needs(resolve(str(plain)))
    assert needs.parameters == whole.parameters
    weights = 4 * 6 * 3 * 64 * 96
    assert needs.dense.stored_bytes == weights * 22 / 32
    assert needs.dense.plain == whole.dense.plain - weights
    assert needs.dense.active == whole.dense.active
    route = implementation_of(resolve(str(mxfp4)))
    assert (route.family, route.path) == ("gpt_oss", OWN)
    assert route.formats.endswith("experts in mxfp4")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"gate_up_proj_scales": None}, "lack the tensor model.layers.0.mlp.experts.gate_up_proj_scales"),
        ({"gate_up_proj_bias": None}, "lack the tensor model.layers.0.mlp.experts.gate_up_proj_bias"),
        (
            {"down_proj_blocks": torch.zeros(6, 64, 2, 16, dtype=torch.uint8)},
            r"down_proj.weight has shape \(64, 64\), the config says \(64, 96\)",
        ),
        (
            {"down_proj_scales": torch.zeros(6, 64, 2, dtype=torch.uint8)},
            r"down_proj_scales has shape \(64, 2\), the config says \(64, 3\)",
        ),
        ({"down_proj_bias": torch.zeros(5, 64)}, "down_proj_bias has 5 experts, the config says more"),
    ],
)
def test_stacks_that_do_not_fit_are_named(changed: dict[str, torch.Tensor | None], words: str, mxfp4: Path) -> None:
    rewrite(mxfp4, **changed)
    with pytest.raises(ConfigError, match=words):
        load(mxfp4)


def test_stacks_that_other_methods_quantised_are_refused(plain: Path) -> None:
    edit(plain, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ConfigError, match="quantisation 'gptq' of a checkpoint of gpt_oss"):
        load_model(resolve(str(plain)), device=CPU, dtype=torch.float32, ops=ReferenceOps(), impl="kvferry")
