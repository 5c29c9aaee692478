"""Checkpoints of GPTQ, AWQ, fp8 and compressed-tensors: their values, the forms they run in, and whole models."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kvferry.engine.models import load_model
from kvferry.engine.models.directory import open_directory
from kvferry.engine.models.quantised import QuantisedWeights
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.cpu.coded_layers import rows_of
from kvferry.kernels.gpu_weight_layout import form_of
from kvferry.kernels.quantised_codes import Codes
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.memory_needs import model_needs
from kvferry.model_files.quantisation import quantisation
from kvferry.model_files.source import resolve
from kvferry.model_files.weight_counts import ON_CPU, ON_GPU
from kvferry.protocol.errors import ConfigError
from tests.engine.quantised_files import awq, fp8, gptq, int8, packed, quantise
from tests.engine.test_models_gguf import same_logits
from tests.engine.test_models_packed import CPU, correlation, load
from tests.engine.tiny_models import family, save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")
compiled = pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension")

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}


def compressed(layout: str, **weights):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
EIGHT = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
EIGHTS = compressed("int-quantized", **EIGHT)
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
EXACT = {
    "gptq": (gptq(4, 32, True), GPTQ, "Q4_0"),
    "gptq-asymmetric": (gptq(4, 64, False), GPTQ | {"sym": False, "group_size": 64}, "Q5_0"),
    "gptq-second": (
        gptq(4, 32, False, second=True),
        GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
        "Q5_0",
    ),
    "gptq-whole": (gptq(4, 0, True), GPTQ | {"group_size": -1}, "Q4_0"),
    "gptq-2": (gptq(2, 32, False), GPTQ | {"bits": 2, "sym": False}, "Q4_0"),
    "gptq-3": (gptq(3, 32, False), GPTQ | {"bits": 3, "sym": False}, "Q4_0"),
    "gptq-8": (gptq(8, 32, True), GPTQ | {"bits": 8}, "Q8_0"),
    "awq": (awq(32), AWQ, "Q5_0"),
    "int4": (packed(4, 32, True), compressed("pack-quantized", **INT4), "Q4_0"),
    "int4-asymmetric": (packed(4, 32, False), compressed("pack-quantized", **INT4 | {"symmetric": False}), "Q5_0"),
    "int8": (int8, EIGHTS, "CODES"),
    "int8-packed": (packed(8, 0, True), compressed("pack-quantized", **EIGHT), "CODES"),
}
NEAR = {
    "gptq-ordered": (gptq(4, 32, True, ordered=True), GPTQ | {"desc_act": True}),
    "gptq-16": (gptq(4, 16, True), GPTQ | {"group_size": 16}),
    "gptq-8-asymmetric": (gptq(8, 32, False), GPTQ | {"bits": 8, "sym": False}),
    "int4-ordered": (packed(4, 32, True, ordered=True), compressed("pack-quantized", **INT4, actorder="group")),
    "fp8": (fp8("tensor", "weight_scale"), FP8),
    "fp8-channel": (fp8("channel", "weight_scale"), compressed("float-quantized", **FLOAT8)),
    "fp8-block": (fp8("block", "weight_scale_inv"), FP8 | {"weight_block_size": [32, 64]}),
}
ALL = {name: case[:2] for name, case in EXACT.items()} | NEAR


class Stored:
    """The tensors of one layer."""

    def __init__(self, parts: dict[str, torch.Tensor]) -> None:
        self._parts = parts

    def find(self, name: str) -> torch.Tensor | None:
        return self._parts.get(name.removeprefix("layer."))

    def holds(self, name: str) -> bool:
        return self.find(name) is not None

    def names(self) -> list[str]:
        return [f"layer.{part}" for part in self._parts]

    def read(self, name: str, out: torch.Tensor) -> None:
        raise AssertionError


def one_layer(layer, config, shape=(96, 128)):
    weight = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    parts, values = layer(weight)
    found = quantisation({"quantization_config": config})
    assert found is not None
    return QuantisedWeights(Stored(parts), found), torch.from_numpy(values.astype(np.float64))


@pytest.mark.parametrize("name", ALL)
def test_values_are_what_numpy_finds(name):
    weights, values = one_layer(*ALL[name])
    out = torch.empty(values.shape)
    weights.read("layer.weight", out)
    torch.testing.assert_close(out.double(), values, rtol=1e-6, atol=1e-7)


@compiled
@pytest.mark.parametrize("name", EXACT)
def test_integer_codes_run_as_they_are_stored(name):
    """Rows of a packed layer are its values, but for scales that a float16 does not hold."""
    layer, config, kind = EXACT[name]
    weights, values = one_layer(layer, config)
    codes = weights.stored("layer.weight", tuple(values.shape))
    assert codes is not None
    linear = CpuOps(1).packed([codes], values.shape[1])
    assert linear is not None
    assert linear.kinds == {kind}
    assert torch.equal(linear.rows(torch.arange(len(values))), values.bfloat16())


@compiled
@pytest.mark.parametrize("name", NEAR)
def test_what_no_integers_hold_becomes_the_nearest_of_eight_bits(name):
    weights, values = one_layer(*NEAR[name])
    codes = weights.stored("layer.weight", tuple(values.shape))
    linear = CpuOps(1).packed([codes], values.shape[1])
    assert linear is not None
    assert linear.kinds == {"Q8_0"}
    found = linear.rows(torch.arange(len(values))).double()
    largest = values.view(len(values), -1, 32).abs().amax(-1, keepdim=True)
    away = (found - values).view(len(values), -1, 32).abs()
    assert (away <= largest * (1 / 254 + 2**-10) + values.view(away.shape).abs() * 2**-8).all()


def test_inputs_that_are_no_whole_runs_are_dequantised():
    weights, _ = one_layer(gptq(4, 0, True), GPTQ | {"group_size": -1}, (32, 48))
    codes = weights.stored("layer.weight", (32, 48))
    assert codes is not None
    assert rows_of(codes) is None


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("quantised") / "plain"
    save_tiny(family("Qwen3Config", head_dim=32, num_hidden_layers=2, intermediate_size=128), path)
    return path


@pytest.mark.parametrize("name", ALL)
def test_whole_models_are_the_dequantised_ones(name, plain, tmp_path):
    """In float32 to the last digits, on kernels of the CPU as near as other forms."""
    layer, config = ALL[name]
    quantise(plain, tmp_path / "quantised", tmp_path / "values", layer, config)
    source = resolve(str(tmp_path / "quantised"))
    model = load_model(source, device=CPU, dtype=torch.float32, ops=ReferenceOps())
    same_logits(model, tmp_path / "values")
    if instruction_set() is not None:
        packed_model = load(tmp_path / "quantised")
        kinds = packed_model.info.revision.split("+")[1:]
        assert kinds == [EXACT[name][2] if name in EXACT else "Q8_0"]
        assert correlation(packed_model, model) > 0.998
        assert correlation(load(tmp_path / "quantised", "none"), model) > 0.998


@pytest.mark.parametrize("name", ALL)
def test_memory_is_known_beforehand(name, plain, tmp_path):
    layer, config = ALL[name]
    quantise(plain, tmp_path / "quantised", tmp_path / "values", layer, config)
    needs, whole = (model_needs(resolve(str(tmp_path / each))) for each in ("quantised", "values"))
    assert needs.parameters == whole.parameters
    weights = open_directory(tmp_path / "quantised", quantisation({"quantization_config": config}))
    stored = coded = 0
    for name, tensor in load_file(tmp_path / "values" / "model.safetensors").items():
        if tensor.dim() == 2 and (codes := weights.stored(name, (len(tensor), tensor.shape[1]))) is not None:
            assert isinstance(codes, Codes)
            stored += rows_of(codes).data.numel()
            if (form := form_of(codes)) is not None:
                coded += form.memory
    assert stored > 0
    assert needs.dense.stored_bytes == stored
    assert needs.dense.coded_bytes == coded
    assert needs.memory(2, ON_GPU) == coded + 2 * (needs.parameters - needs.dense.coded)
    assert needs.memory(2, ON_CPU) == stored + 2 * (needs.embedding.plain + needs.head.plain + needs.dense.plain)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GPTQ | {"bits": 5}, "'gptq', and 5 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "'gptq', and the layout 'marlin'"),
        (AWQ | {"version": "gemv"}, "'awq', and the layout 'gemv'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes', and that method"),
        (compressed("nvfp4-pack-quantized", **INT4), "the format 'nvfp4-pack-quantized'"),
        (compressed("pack-quantized", num_bits=6, type="int"), "int6 weights"),
        (GPTQ | {"bits": "few"}, "invalid quantization_config"),
        (FP8 | {"weight_block_size": [0, 128]}, "blocks of 0 x 128"),
    ],
)
def test_unsupported_variants_are_named_with_what_is_supported(config, words, plain, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((plain / "config.json").read_text()) | {"quantization_config": config})
    )
    (tmp_path / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=words) as caught:
        load_model(resolve(str(tmp_path)), device=CPU, dtype=torch.float32, ops=ReferenceOps())
    assert "\n" not in caught.value.message
    assert "AWQ of 4 bits (gemm), fp8 and compressed-tensors (int4, int8, fp8) are" in caught.value.message


def test_experts_of_transformers_modules_are_refused_by_name(tmp_path):
    save_tiny(family("FlexOlmoConfig", num_experts=6, num_experts_per_tok=3, pad_token_id=0), tmp_path / "plain")
    quantise(tmp_path / "plain", tmp_path / "quantised", tmp_path / "values", int8, EIGHTS)
    with pytest.raises(ConfigError, match=r"its quantized model.layers.0.mlp.experts.0.down_proj is not a dense layer"):
        load_model(resolve(str(tmp_path / "quantised")), device=CPU, dtype=torch.float32, ops=ReferenceOps())


@pytest.mark.parametrize("lost", ["qzeros", "scales"])
def test_a_tensor_that_lacks_is_named(lost):
    weights, values = one_layer(gptq(4, 32, True), GPTQ)
    weights._tensors._parts.pop(lost)
    with pytest.raises(ConfigError, match=f"lack the tensor layer.{lost}"):
        weights.read("layer.weight", torch.empty(values.shape))


def test_tensors_that_do_not_fit_the_config_are_named():
    weights, _ = one_layer(gptq(4, 32, True), GPTQ)
    with pytest.raises(ConfigError, match="layer"):
        weights.read("layer.weight", torch.empty(96, 256))
    with pytest.raises(ConfigError, match="layer"):
        weights.read("layer.weight", torch.empty(64, 128))
