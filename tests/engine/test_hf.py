"""Models of transformers over our paged cache, and the door to transformers itself."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvferry.engine.models import load_model
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.models.hf import HFModel
from kvferry.engine.models.hf_attention import LayerShape, ShapeProbe, slot_attention
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError
from tests.engine.tiny_models import (
    OURS,
    chunked_logits,
    expect_equal_logits,
    family,
    oracle_logits,
    save_tiny,
    tokens_for,
)

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]

OTHERS = {
    "gpt2": lambda: family("GPT2Config", n_embd=64, n_layer=3, n_head=4, n_positions=128),
    "gpt2-scaled-by-layer": lambda: family(
        "GPT2Config", n_embd=64, n_layer=2, n_head=4, n_positions=128, scale_attn_by_inverse_layer_idx=True
    ),
    "gpt-neox": lambda: family("GPTNeoXConfig", rotary_pct=0.5),
    "opt": lambda: family("OPTConfig", ffn_dim=96, word_embed_proj_dim=64, do_layer_norm_before=True),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def load(path, impl="auto", **extra):
    return load_model(resolve(str(path)), device=CPU, dtype=torch.float32, ops=ReferenceOps(), impl=impl, **extra)


@pytest.mark.parametrize("name", OTHERS)
def test_logits_equal_transformers(name, tmp_path):
    save_tiny(OTHERS[name](), tmp_path)
    model = load(tmp_path)
    assert isinstance(model, HFModel)
    expect_equal_logits(model, lambda tokens: oracle_logits(tmp_path, tokens))


def test_longrope_is_served_to_its_original_length(tmp_path):
    """transformers takes the factors by the longest sequence of a batch."""
    save_tiny(OURS["phi3-long"](), tmp_path)
    assert load(tmp_path, impl="transformers").info.max_model_len == 16
    assert load(tmp_path).info.max_model_len == 128


AGREEING = (
    *("llama3", "mistral-window", "qwen2-window", "qwen3", "smollm3", "phi3-window-partial", "granite-biased"),
    *("gemma", "gemma3", "olmo2", "cohere", "cohere2", "qwen3-moe", "mixtral", "olmoe"),
)


@pytest.mark.parametrize("name", AGREEING)
def test_both_implementations_agree_on_our_families(name, tmp_path):
    save_tiny(OURS[name](), tmp_path)
    tokens, chunks = tokens_for(40), [17, 13, *[1] * 10]
    ours, theirs = load(tmp_path), load(tmp_path, impl="transformers")
    assert isinstance(ours, Decoder)
    assert isinstance(theirs, HFModel)
    assert ours.info == theirs.info
    wanted = chunked_logits(theirs, tokens, chunks)
    torch.testing.assert_close(chunked_logits(ours, tokens, chunks), wanted, rtol=2e-4, atol=2e-4)


def test_facts_and_progress(tmp_path):
    save_tiny(OTHERS["gpt2"](), tmp_path)
    seen = []
    model = load(tmp_path, progress=seen.append)
    info = model.info
    assert (info.num_layers, info.num_kv_heads, info.head_dim, info.vocab_size) == (3, 4, 16, 97)
    assert (info.max_model_len, model.dtype) == (128, torch.float32)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (lambda: family("GPTNeoConfig", attention_types=[[["global"], 3]]), "attention interface"),
        (lambda: family("BloomConfig", n_layer=2, n_head=4), "position_ids"),
        (lambda: family("MambaConfig", state_size=4), "position_ids"),
    ],
)
def test_what_is_not_supported_is_refused_at_load(config, words, tmp_path):
    save_tiny(config(), tmp_path)
    with pytest.raises(ConfigError, match=words):
        load(tmp_path)


def shape(**values):
    return LayerShape(**({"heads": 4, "kv_heads": 2, "head_dim": 16, "value_dim": 16, "window": 0} | values))


@pytest.mark.parametrize(
    ("shapes", "config", "words"),
    [
        ([shape()], {}, "only 1 of the model's 2 layers"),
        ([shape(), shape(kv_heads=4)], {}, "different shapes"),
        ([shape(value_dim=8)] * 2, {}, "different shapes"),
        ([shape()] * 2, {"layer_types": ["full_attention", "sliding_attention"]}, "hides its sliding window"),
        ([shape()] * 2, {"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'"),
    ],
)
def test_probe_refuses(shapes, config, words):
    with pytest.raises(ConfigError, match=words):
        ShapeProbe(dict(enumerate(shapes))).check(SimpleNamespace(num_hidden_layers=2, **config))


@pytest.mark.parametrize("extra", [{"softcap": 30.0}, {"s_aux": torch.zeros(4)}, {"attention_mask": torch.zeros(1)}])
def test_attention_that_is_more_than_causal_is_refused(extra):
    module = torch.nn.Module()
    query, key, value = [torch.zeros(1, 4, 2, 8)] * 3
    mask = extra.pop("attention_mask", None)
    with pytest.raises(ConfigError, match="model's attention uses"):
        slot_attention(module, query, key, value, mask, **extra)


def test_logits_changed_in_an_unknown_way_are_refused(tmp_path, monkeypatch):
    from transformers import GPT2LMHeadModel

    save_tiny(OTHERS["gpt2"](), tmp_path)
    forward = GPT2LMHeadModel.forward

    def doubled(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        out.logits = out.logits * 2
        return out

    monkeypatch.setattr(GPT2LMHeadModel, "forward", doubled)
    with pytest.raises(ConfigError, match="changes its logits"):
        load(tmp_path)


def test_transformers_errors_are_one_line(tmp_path):
    save_tiny(OTHERS["gpt2"](), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ConfigError, match="transformers cannot load") as caught:
        load(tmp_path)
    assert "\n" not in caught.value.message


def test_a_missing_tensor_is_named_and_not_made_up(tmp_path):
    from safetensors.torch import load_file, save_file

    save_tiny(OTHERS["gpt2"](), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: value for name, value in load_file(file).items() if "h.1.mlp.c_fc" not in name}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack the tensor transformer.h.1.mlp.c_fc.bias and 1 more"):
        load(tmp_path)


PROBE = """
import importlib.metadata
assert importlib.metadata.version("kernels") == {version!r}
from transformers.utils import import_utils
assert import_utils._is_package_available("kernels", return_version=True) == (True, {version!r})
from kvferry.engine.models.hf import transformers_module
transformers = transformers_module()
assert not import_utils.is_kernels_available()
assert not transformers.utils.is_kernels_available()
from transformers import LlamaConfig, LlamaForCausalLM
import transformers.integrations.hub_kernels, transformers.models.mra.modeling_mra
LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                             num_attention_heads=1))
import kvferry.kernels
assert kvferry.kernels.__file__ == {package!r}, kvferry.kernels.__file__
"""

WITHOUT_THE_DOOR = """
try:
    from transformers import LlamaForCausalLM
except (ImportError, RuntimeError, ModuleNotFoundError) as error:
    assert "kernels" in str(error), error
else:
    raise SystemExit("transformers did not fall for the fake distribution: the test proves nothing")
"""


def run(code: str, path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={"PYTHONPATH": f"{ROOT}:{path}", "PATH": ""}, timeout=120,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_distribution_called_kernels_does_not_mislead_transformers(tmp_path):
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    info = tmp_path / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    run(PROBE.format(version=KERNELS_MIN_VERSION, package=str(ROOT / "kernels" / "__init__.py")), tmp_path)
    run(WITHOUT_THE_DOOR, tmp_path)
