"""Models of transformers on the compiled CPU kernels: their dense layers are ours, in every form that ours have."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from functools import partial

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.budget import Limits
from kvferry.engine.engine import Engine, EngineConfig
from kvferry.engine.events import Generated, Stepped
from kvferry.engine.ledger import Ledger
from kvferry.engine.models.hf import HFModel
from kvferry.engine.models.hf_dense import DenseModule, EmbeddingModule, outputs_first
from kvferry.engine.models.hf_stored import GGUFRows
from kvferry.engine.runner import Runner
from kvferry.kernels.cpu import instruction_set
from kvferry.kernels.cpu.packed_layers import PackedLinear
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.gguf import read_gguf
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate
from kvferry.runtime.shared_file import make
from tests.engine import test_models_packed
from tests.engine.quantised_files import awq, fp8, gptq, int8, packed, quantise
from tests.engine.test_hf import OTHERS
from tests.engine.test_models_gguf import Kind
from tests.engine.test_models_packed import correlation
from tests.engine.test_models_quantised import AWQ, EIGHTS, FP8, GPTQ, INT4, compressed
from tests.engine.tiny_models import (
    BLOCK,
    chunked_logits,
    expect_equal_logits,
    family,
    oracle_logits,
    save_tiny,
    tokens_for,
    transformers,
)
from tests.gguf_files import finish, gguf_name

pytestmark = [
    pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension"),
    pytest.mark.usefixtures("one_thread"),
]

load = partial(test_models_packed.load, impl="transformers")
"""Some of these families run on our own decoder, too."""
FAMILIES = {
    "gpt2": OTHERS["gpt2"],
    "gpt-neox": lambda: family("GPTNeoXConfig", rotary_pct=0.5, attention_bias=True),
    "opt": OTHERS["opt"],
    "starcoder2": lambda: family("Starcoder2Config", sliding_window=9, use_bias=True, tie_word_embeddings=True),
    "stablelm": lambda: family("StableLmConfig", use_qkv_bias=True),
    "phi": lambda: family("PhiConfig"),
    "olmo": lambda: family("OlmoConfig", pad_token_id=0),
    "nemotron": lambda: family("NemotronConfig", head_dim=16),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_equals_transformers(name, tmp_path):
    save_tiny(FAMILIES[name](), tmp_path)
    model = load(tmp_path, dtype=torch.float32)
    assert isinstance(model, HFModel)
    expect_equal_logits(model, lambda tokens: oracle_logits(tmp_path, tokens), tolerance=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_transformers_own(name, tmp_path):
    """And every dense layer is packed, the vocabulary's included."""
    save_tiny(FAMILIES[name](), tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    ours = load(tmp_path)
    assert [each for each in ours._module.modules() if outputs_first(each) is not None] == []
    errors: dict[str, list[float]] = {"theirs": [], "ours": []}
    for seed in range(6):
        tokens = tokens_for(40, seed)
        wanted = oracle_logits(tmp_path, tokens)
        with torch.inference_mode():
            found = {"theirs": theirs(input_ids=tokens[None]).logits[0].float()}
        found["ours"] = chunked_logits(ours, tokens, [23, 17])
        for who, logits in found.items():
            errors[who].append(float((logits - wanted).square().mean()))
    assert sum(errors["ours"]) < 1.5 * sum(errors["theirs"]), errors


@pytest.mark.parametrize("name", FAMILIES)
def test_int8_is_near(name, tmp_path):
    save_tiny(FAMILIES[name](), tmp_path)
    model, exact = load(tmp_path, "int8"), load(tmp_path, dtype=torch.float32, ops=ReferenceOps())
    assert model.info.revision == f"{exact.info.revision}+INT8"
    assert correlation(model, exact) > 0.995


def test_a_tied_embedding_is_packed_once(tmp_path):
    save_tiny(FAMILIES["starcoder2"](), tmp_path / "tied")
    model = load(tmp_path / "tied")
    module, logits = model._module, chunked_logits(model, tokens_for(9), [9])
    assert not torch.equal(logits, logits.bfloat16().float()), "logits are not rounded to bfloat16"
    words, head = module.get_input_embeddings(), module.get_output_embeddings()
    assert isinstance(words, EmbeddingModule)
    assert isinstance(head, DenseModule)
    assert words.linear is head.linear
    save_tiny(FAMILIES["gpt-neox"](), tmp_path / "untied")
    module = load(tmp_path / "untied")._module
    assert module.get_input_embeddings().linear is not module.get_output_embeddings().linear


def test_a_row_of_a_dense_layer_has_the_same_bits_beside_any_others(tmp_path):
    save_tiny(FAMILIES["gpt2"](), tmp_path)
    module = load(tmp_path)._module
    layer = module.transformer.h[0].attn.c_attn
    x = torch.randn(1, 37, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    whole = layer(x)
    assert torch.equal(torch.cat([layer(part) for part in x.split([1, 5, 31], 1)], 1), whole)


def served(model, prompts, limits: Limits) -> tuple[list[list[int]], int]:
    """Greedy tokens of the prompts, each added once the one before has some, and how many tokens were reused."""
    kv = torch.zeros(64, *model.info.layout(model.dtype, BLOCK).block_shape, dtype=model.dtype)
    engine = Engine(EngineConfig("f" * 32, BLOCK, 128, limits), Runner(model, kv, BLOCK), BlockPool(64, Ledger(64)))
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
        engine.add(Job(str(index), 0, tuple(prompt), len(prompt), Generate(params), "router"))
        for _ in range(8):
            engine.step()
    while engine.has_work():
        assert engine.step()
    engine.check_integrity()
    made = defaultdict[str, list[int]](list)
    for event in engine.events:
        if isinstance(event, Generated):
            made[event.key[0]] += event.delta.token_ids
    computed = sum(event.prefill_tokens for event in engine.events if isinstance(event, Stepped))
    return [made[str(index)] for index in range(len(prompts))], sum(map(len, prompts)) - computed


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox", "starcoder2"])
def test_the_engine_makes_transformers_tokens(name, tmp_path):
    """In chunks, beside other streams, behind a prefix that is reused; greedy, in float32."""
    save_tiny(FAMILIES[name](), tmp_path)
    base = tokens_for(40).tolist()
    prompts = [base, base[:32] + tokens_for(9, 1).tolist(), tokens_for(21, 2).tolist()]
    made, reused = served(load(tmp_path, dtype=torch.float32), prompts, Limits(24, 12, 8))
    assert reused == 32
    for prompt, tokens in zip(prompts, made, strict=True):
        likeliest = oracle_logits(tmp_path, torch.tensor(prompt + tokens)).argmax(-1).tolist()
        assert tokens == likeliest[len(prompt) - 1 : -1]


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_packed_layers_make_the_same_first_tokens_in_every_batch(quantization, tmp_path):
    save_tiny(FAMILIES["gpt-neox"](), tmp_path)
    model = load(tmp_path, quantization)
    prompts = [tokens_for(40, seed).tolist() for seed in range(4)]
    together, _ = served(model, prompts, Limits(24, 12, 8))
    alone = [served(model, [prompt], Limits(64, 64, 8))[0][0] for prompt in prompts]
    assert [tokens[0] for tokens in together] == [tokens[0] for tokens in alone]


def test_other_operations_and_formats_leave_the_modules_alone(tmp_path):
    save_tiny(FAMILIES["gpt2"](), tmp_path)
    for how in ({"ops": ReferenceOps()}, {"dtype": torch.float32}):
        module = load(tmp_path, **how)._module
        assert not any(isinstance(each, DenseModule | EmbeddingModule) for each in module.modules())


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Spelled(torch.nn.Linear):
    def forward(self, x):
        return x @ self.weight.T + self.bias


def test_a_kind_of_layer_is_taken_for_dense_by_what_it_computes():
    assert outputs_first(Doubled(64, 32)) is None
    assert outputs_first(torch.nn.LayerNorm(64)) is None
    spelled, conv = Spelled(64, 32), transformers.pytorch_utils.Conv1D(32, 64)
    assert torch.equal(outputs_first(spelled), spelled.weight)
    assert torch.equal(outputs_first(conv), conv.weight.t())


def test_number_formats_of_their_own_accord(tmp_path):
    """bfloat16 where all dense layers are packed; experts are PyTorch's."""
    save_tiny(FAMILIES["gpt-neox"](), tmp_path / "dense")
    assert load(tmp_path / "dense", dtype=None).dtype == torch.bfloat16
    save_tiny(family("FlexOlmoConfig", num_experts=6, num_experts_per_tok=3, pad_token_id=0), tmp_path / "experts")
    known = torch.cpu.get_capabilities()
    native = known.get("avx512_bf16") or known.get("amx_bf16")
    assert load(tmp_path / "experts", dtype=None).dtype == (torch.bfloat16 if native else torch.float32)


CODED = {
    "gptq": (gptq(4, 32, True), GPTQ, "Q4_0"),
    "gptq-ordered": (gptq(4, 32, True, ordered=True), GPTQ | {"desc_act": True}, "Q8_0"),
    "awq": (awq(32), AWQ, "Q5_0"),
    "fp8": (fp8("block", "weight_scale_inv"), FP8 | {"weight_block_size": [32, 64]}, "Q8_0"),
    "int4": (packed(4, 32, True), compressed("pack-quantized", **INT4), "Q4_0"),
    "int8": (int8, EIGHTS, "CODES"),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("hf_packed") / "plain"
    save_tiny(family("GPTNeoXConfig", num_hidden_layers=2, intermediate_size=128, attention_bias=True), path)
    return path


@pytest.mark.parametrize("name", CODED)
def test_quantised_checkpoints_are_the_dequantised_models(name, plain, tmp_path):
    """In float32 to the last digits; on the CPU's kernels in their codes."""
    layer, config, kind = CODED[name]
    quantise(plain, tmp_path / "quantised", tmp_path / "values", layer, config)
    exact = load(tmp_path / "quantised", dtype=torch.float32, ops=ReferenceOps())
    expect_equal_logits(exact, lambda tokens: oracle_logits(tmp_path / "values", tokens), tolerance=1e-4)
    model = load(tmp_path / "quantised")
    assert model.info.revision.split("+")[1:] == [kind]
    assert isinstance(model._module.gpt_neox.layers[0].mlp.dense_h_to_4h.linear, PackedLinear)
    for how in ("auto", "none", "int8"):
        assert correlation(load(tmp_path / "quantised", how), exact) > 0.995


def test_codes_of_gpt2_whose_weights_lie_inputs_first(tmp_path):
    """GPTQ stores those as it does all others."""
    save_tiny(FAMILIES["gpt2"](), tmp_path / "plain")
    plain, name = load_file(tmp_path / "plain" / "model.safetensors"), "transformer.h.1.mlp.c_fc"
    parts, same = gptq(4, 32, True)(plain[f"{name}.weight"].t().contiguous().numpy())
    coded = plain | {f"{name}.{part}": each.contiguous() for part, each in parts.items()}
    del coded[f"{name}.weight"]
    values = plain | {f"{name}.weight": torch.from_numpy(np.ascontiguousarray(same.T, np.float32))}
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    for path, tensors, extra in (("coded", coded, {"quantization_config": GPTQ}), ("values", values, {})):
        (tmp_path / path).mkdir()
        save_file(tensors, tmp_path / path / "model.safetensors", {"format": "pt"})
        (tmp_path / path / "config.json").write_text(json.dumps(config | extra))
    exact = load(tmp_path / "coded", dtype=torch.float32, ops=ReferenceOps())
    expect_equal_logits(exact, lambda tokens: oracle_logits(tmp_path / "values", tokens), tolerance=1e-4)
    assert load(tmp_path / "coded").info.revision.endswith("+Q4_0")


def test_codes_that_are_no_layers_are_named(plain, tmp_path):
    quantise(plain, tmp_path / "quantised", tmp_path / "values", gptq(4, 32, True), GPTQ)
    file = tmp_path / "quantised" / "model.safetensors"
    tensors = load_file(file)
    save_file({name.replace("dense_h_to_4h", "up"): each for name, each in tensors.items()}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"its quantized gpt_neox.layers.0.mlp.up is not a dense layer of GPTNeoX"):
        load(tmp_path / "quantised")
    save_file(load_file(plain / "model.safetensors"), file, {"format": "pt"})
    with pytest.raises(ConfigError, match="its files hold no codes"):
        load(tmp_path / "quantised")


def write_starcoder2(path, directory, kind):
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config, writer = model.config, gguf.GGUFWriter(str(path), "starcoder2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_eps(config.norm_epsilon)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([str(token) for token in range(config.vocab_size)])
    for name, value in model.state_dict().items():
        stored = kind if value.ndim > 1 else Kind.F32
        called = gguf_name(name, {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"})
        writer.add_tensor(called, gguf.quantize(value.numpy(), stored), raw_dtype=stored)
    finish(writer)
    return path


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q5_1], ids=lambda kind: kind.name)
def test_a_gguf_runs_as_stored(kind, tmp_path):
    pytest.importorskip("accelerate", reason="transformers reads no GGUF without it")
    save_tiny(family("Starcoder2Config", sliding_window=None, use_bias=True), tmp_path / "hf")
    path = write_starcoder2(tmp_path / "q.gguf", tmp_path / "hf", kind)
    model, exact = load(path), load(path, dtype=torch.float32, ops=ReferenceOps())
    assert isinstance(model, HFModel)
    assert model.info.revision == f"{exact.info.revision}+{kind.name}"
    assert load(path, "none").info.revision == exact.info.revision
    assert load(path, "int8").info.revision == f"{exact.info.revision}+INT8"
    assert correlation(model, exact) > 0.998
    layer = model._module.model.layers[1].mlp.c_fc
    wanted = exact._module.model.layers[1].mlp.c_fc.weight.detach()
    assert torch.equal(layer.linear.rows(torch.arange(len(wanted))), wanted.bfloat16())
    rows = GGUFRows(read_gguf(path))
    assert rows(wanted.bfloat16()).kind == kind.name
    assert rows(torch.cat((wanted[:1], wanted[1:].flip(0)))) is None


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="not Linux")
@pytest.mark.parametrize("quantization", ["auto", "int8"])
@pytest.mark.parametrize("name", ["gpt2", "gpt-neox", "opt", "starcoder2"])
def test_processes_have_one_copy_of_what_is_packed(name, quantization, tmp_path):
    save_tiny(FAMILIES[name](), tmp_path)
    descriptor = make()
    try:
        own, first, second = (load(tmp_path, quantization, weights_fd=fd) for fd in (-1, descriptor, descriptor))
    finally:
        os.close(descriptor)
    tokens = tokens_for(40)
    wanted = chunked_logits(own, tokens, [23, 17])
    for each in (first, second):
        assert each.info == own.info
        assert torch.equal(chunked_logits(each, tokens, [23, 17]), wanted)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="not Linux")
def test_processes_have_one_copy_of_codes(plain, tmp_path):
    quantise(plain, tmp_path / "coded", tmp_path / "values", gptq(4, 32, True), GPTQ)
    descriptor = make()
    try:
        own, first, second = (load(tmp_path / "coded", weights_fd=fd) for fd in (-1, descriptor, descriptor))
    finally:
        os.close(descriptor)
    wanted = chunked_logits(own, tokens_for(40), [23, 17])
    for each in (first, second):
        assert each.info == own.info
        assert torch.equal(chunked_logits(each, tokens_for(40), [23, 17]), wanted)
