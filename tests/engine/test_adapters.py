"""Adapters against transformers with the adapter merged into its weights; batches that mix them; what is refused."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.budget import Limits
from kvferry.engine.engine import Engine, EngineConfig
from kvferry.engine.events import Failed, Generated
from kvferry.engine.ledger import Ledger
from kvferry.engine.models import load_model
from kvferry.engine.models.adapters import load_adapter
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.runner import Runner
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.lora import Adapted, Adapter
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.adapter import FUSED, TARGETS, read_adapter
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError
from tests.adapter_files import ATTENTION, merge, save_adapter
from tests.engine.tiny_models import (
    BLOCK,
    COHERE,
    GEMMA2,
    GEMMA3,
    GEMMA3N,
    GEMMA4,
    GEMMA4_EXPERTS,
    GEMMA4_LARGE,
    GPT_OSS,
    GRANITE,
    chunked_logits,
    expect_equal_logits,
    family,
    save_tiny,
    tokens_for,
    transformers,
)
from tests.toy import make_job

CPU = torch.device("cpu")
ROWS = {"reference": ReferenceOps, "cpu": CpuOps} if instruction_set() else {"reference": ReferenceOps}
pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = {
    "llama": lambda: family("LlamaConfig", head_dim=32),
    "qwen3": lambda: family("Qwen3Config", head_dim=32, tie_word_embeddings=True),
    "granite": lambda: family("GraniteConfig", **GRANITE),
    "gemma3": lambda: family("Gemma3TextConfig", num_hidden_layers=4, **GEMMA3),
    "olmo2": lambda: family("Olmo2Config", pad_token_id=0),
    "phi3": lambda: family("Phi3Config", pad_token_id=0, sliding_window=None),
    "gemma2": lambda: family("Gemma2Config", num_hidden_layers=4, **GEMMA2),
    "glm4": lambda: family("Glm4Config", head_dim=16, pad_token_id=0),
    "cohere": lambda: family("CohereConfig", use_qk_norm=True, **COHERE),
    "cohere2": lambda: family("Cohere2Config", num_hidden_layers=4, sliding_window=9, **COHERE),
    "gpt-oss": lambda: family("GptOssConfig", **GPT_OSS),
    "mixtral": lambda: family("MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
}

SHAPED = {
    "gemma3n": lambda: family("Gemma3nTextConfig", **GEMMA3N),
    "gemma4": lambda: family("Gemma4TextConfig", **GEMMA4),
    "gemma4-large": lambda: family("Gemma4TextConfig", **GEMMA4_LARGE, **GEMMA4_EXPERTS),
}
"""Families that run on one rank."""


def targets_of(name: str) -> tuple[str, ...]:
    """Experts have none."""
    if name in ("mixtral", "gpt-oss"):
        return ATTENTION[:4]
    if name == "glm4":
        return (*ATTENTION[:4], "gate_up_proj", "down_proj")
    return FUSED if name == "phi3" else TARGETS


def hf(path: Path) -> torch.nn.Module:
    loaded: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    return loaded.eval()


def load(path: Path, ops: Ops | None = None, dtype: torch.dtype = torch.float32) -> Decoder:
    model = load_model(resolve(str(path)), device=CPU, dtype=dtype, ops=ops or ReferenceOps(), impl="kvferry")
    assert isinstance(model, Decoder)
    return model


def adapter_of(path: Path, model: Decoder) -> Adapter:
    return load_adapter(read_adapter(str(path), 64), model)


class Wearing(Decoder):
    """A decoder that computes every token with one adapter."""

    adapter: Adapter

    def forward(self, token_ids, kv, plan, *how):
        adapted = (Adapted(self.adapter, torch.arange(plan.num_tokens)),)
        return super().forward(token_ids, kv, replace(plan, adapted=adapted), *how)


def wearing(model: Decoder, adapter: Adapter) -> Decoder:
    model.__class__ = type("Wearing", (Wearing, type(model)), {})
    model.adapter = adapter  # type: ignore[attr-defined]
    return model


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    save_tiny(FAMILIES["llama"](), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("ops", ROWS)
@pytest.mark.parametrize("name", [*FAMILIES, *SHAPED])
def test_logits_equal_those_of_merged_weights(name: str, ops: str, tmp_path: Path) -> None:
    save_tiny((FAMILIES | SHAPED)[name](), tmp_path / "model")
    path = save_adapter(tmp_path / "a", hf(tmp_path / "model"), targets=targets_of(name))
    merged = merge(hf(tmp_path / "model"), path)
    model = load(tmp_path / "model", ROWS[ops]())
    plain = chunked_logits(model, tokens_for(45, 1), [45])
    model = wearing(model, adapter_of(path, model))

    def oracle(tokens: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return merged(input_ids=tokens[None]).logits[0].float()  # type: ignore[no-any-return]

    expect_equal_logits(model, oracle)
    assert (chunked_logits(model, tokens_for(45, 1), [45]) - plain).abs().max() > 0.5, "the adapter must matter"


def test_an_adapter_of_a_multimodal_checkpoint_is_its_texts(tiny: Path, tmp_path: Path) -> None:
    path, model = save_adapter(tmp_path / "a", hf(tiny)), load(tiny)
    plain = adapter_of(path, model)
    stored = load_file(path / "adapter_model.safetensors")
    nested = {name.replace("model.layers", "model.language_model.layers"): tensor for name, tensor in stored.items()}
    save_file(nested, path / "adapter_model.safetensors")
    found = adapter_of(path, model)
    assert found.num_bytes == plain.num_bytes
    for one, other in zip(found.layers, plain.layers, strict=True):
        assert torch.equal(one["qkv"][0].up, other["qkv"][0].up)


def test_a_layer_that_shares_its_k_and_v_has_no_place_for_them(tmp_path: Path) -> None:
    save_tiny(SHAPED["gemma4"](), tmp_path / "model")
    path, model = save_adapter(tmp_path / "a", hf(tmp_path / "model")), load(tmp_path / "model")
    stored = load_file(path / "adapter_model.safetensors")
    stored |= {name.replace("layers.3", "layers.5"): t.clone() for name, t in stored.items() if "3.self_attn.k" in name}
    save_file(stored, path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="its target k_proj is not one of o_proj, q_proj, down_proj"):
        adapter_of(path, model)


@pytest.mark.parametrize(
    "changes",
    [{"targets": ("q_proj", "v_proj")}, {"targets": ("up_proj",)}, {"use_rslora": True}, {"rank": 1, "alpha": 3}],
    ids=str,
)
def test_targets_ranks_and_scales(changes: dict, tiny: Path, tmp_path: Path) -> None:
    path = save_adapter(tmp_path / "a", hf(tiny), **changes)
    model = load(tiny)
    with torch.inference_mode():
        wanted = merge(hf(tiny), path)(input_ids=tokens_for(20)[None]).logits[0]
    got = chunked_logits(wearing(model, adapter_of(path, model)), tokens_for(20), [7, 13])
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)


def engine_of(model: Decoder, blocks: int = 128) -> Engine:
    kv = torch.zeros(blocks, *model.info.layout(model.dtype, BLOCK).block_shape, dtype=model.dtype)
    config = EngineConfig("f" * 32, BLOCK, 128, Limits(24, 12, 8))
    return Engine(config, Runner(model, kv, BLOCK), BlockPool(blocks, Ledger(blocks)))


def drive(engine: Engine, steps: int = 200) -> dict[str, list[int]]:
    """Tokens by request, once nothing is left to do."""
    tokens: dict[str, list[int]] = {}
    for _ in range(steps):
        if not engine.has_work():
            break
        engine.step()
    assert not engine.has_work()
    for event in engine.events:
        assert not isinstance(event, Failed), event.error
        if isinstance(event, Generated):
            tokens.setdefault(event.key[0], []).extend(event.delta.token_ids)
    engine.events.clear()
    engine.check_integrity()
    return tokens


@pytest.mark.parametrize(
    ("ops", "dtype"), [("reference", torch.float32), ("cpu", torch.float32), ("cpu", torch.bfloat16)]
)
def test_a_batch_that_mixes_adapters_gives_each_what_it_gets_alone(
    ops: str, dtype: torch.dtype, tiny: Path, tmp_path: Path
) -> None:
    """Through chunked prompts and decode steps, with prompts that begin alike; then again from the cache."""
    if ops not in ROWS:
        pytest.skip("no compiled kernels on this machine")
    paths = {name: save_adapter(tmp_path / name, hf(tiny), seed=seed) for seed, name in enumerate("xy")}
    prompt = tokens_for(40).tolist()
    jobs = [(f"{adapter}{i}", adapter, prompt[: 30 + 5 * i]) for i in range(2) for adapter in ("", "x", "y")]

    def run(chosen: list[tuple[str, str, list[int]]], again: bool = False) -> dict[str, list[int]]:
        engine = engine_of(model)
        for adapter in adapters.values():
            engine.adapters.put(adapter)
        for _ in range(1 + again):
            for name, key, tokens in chosen:
                engine.add(replace(make_job(name, tokens, 12), adapter=adapters[key].id if key else ""))
            made = drive(engine)
        return made

    model = load(tiny, ROWS[ops](), dtype)
    adapters = {name: adapter_of(path, model) for name, path in paths.items()}
    alone = {name: tokens for job in jobs for name, tokens in run([job]).items()}
    assert run(jobs) == alone
    assert run(jobs, again=True) == alone, "cached blocks are found under the adapter's own root"
    assert alone["0"] != alone["x0"] != alone["y0"]
    if dtype == torch.float32:
        for name, adapter, tokens in jobs:
            merged: Any = merge(hf(tiny), paths[adapter]) if adapter else hf(tiny)
            made = merged.generate(
                input_ids=torch.tensor([tokens]),
                max_new_tokens=12,
                min_new_tokens=12,
                do_sample=False,
                eos_token_id=None,
            )
            assert made[0, len(tokens) :].tolist() == alone[name], name


def test_blocks_of_one_adapter_are_not_another_s(tiny: Path, tmp_path: Path) -> None:
    model = load(tiny)
    adapter = adapter_of(save_adapter(tmp_path / "a", hf(tiny)), model)
    engine = engine_of(model)
    engine.adapters.put(adapter)
    prompt = tokens_for(40).tolist()
    for name, adapter_id in (("p", ""), ("q", adapter.id), ("r", adapter.id)):
        engine.add(replace(make_job(name, prompt, 2), adapter=adapter_id))
        while engine.has_work():
            engine.step()
    reused = [e.delta.reuse.cached_len for e in engine.events if isinstance(e, Generated) and e.delta.reuse]
    assert reused == [0, 0, 32]


def test_an_adapter_that_is_dropped_serves_its_attempts_to_their_end_and_then_its_memory_is_free(
    tiny: Path, tmp_path: Path
) -> None:
    model = load(tiny)
    path = save_adapter(tmp_path / "a", hf(tiny))
    engine, adapter = engine_of(model), adapter_of(path, model)
    seen, adapter_id = weakref.ref(adapter.layers[0]["down"][0].up), adapter.id
    engine.adapters.put(adapter)
    job = replace(make_job("long", tokens_for(20).tolist(), 30), adapter=adapter_id)
    engine.add(job)
    whole = drive(engine)["long"]
    engine.add(job)
    for _ in range(5):
        engine.step()
    engine.adapters.drop(adapter_id, engine.request_table)
    engine.add(replace(make_job("late", [1, 2, 3]), adapter=adapter_id))
    (refused,) = [event for event in engine.events if isinstance(event, Failed)]
    assert (refused.key[0], refused.error.code, refused.error.status) == ("late", "adapter_not_loaded", 503)
    engine.events.remove(refused)
    assert seen() is not None
    assert drive(engine)["long"] == whole
    assert seen() is None


def test_an_idle_adapter_is_gone_at_once(tiny: Path, tmp_path: Path) -> None:
    model = load(tiny)
    engine, adapter = engine_of(model), adapter_of(save_adapter(tmp_path / "a", hf(tiny)), model)
    assert adapter.num_bytes == 4 * sum(
        t.numel() for t in load_file(tmp_path / "a" / "adapter_model.safetensors").values()
    )
    seen, adapter_id = weakref.ref(adapter.layers[0]["down"][0].up), adapter.id
    engine.adapters.put(adapter)
    engine.add(replace(make_job("a", [1, 2, 3]), adapter=adapter_id))
    drive(engine)
    engine.adapters.drop(adapter_id, engine.request_table)
    assert seen() is None


CONFIGS = {
    "peft_type is 'IA3'": {"peft_type": "IA3"},
    "changes biases": {"bias": "all"},
    "DoRA": {"use_dora": True},
    "ranks that differ": {"rank_pattern": {"q_proj": 2}},
    "whole modules": {"modules_to_save": ["lm_head"]},
    "target lm_head is not one of q_proj": {"target_modules": ["q_proj", "lm_head"]},
    "its rank is 65 and --max-lora-rank is 64": {"r": 65},
    "must be a whole number and a number": {"r": "four"},
    "shapes ((4, 96), (64, 4)); model needs ((8, 96), (64, 8))": {"r": 8},
}


@pytest.mark.parametrize("message", CONFIGS)
def test_what_an_adapter_may_not_say(message: str, tiny: Path, tmp_path: Path) -> None:
    path = save_adapter(tmp_path / "a", hf(tiny))
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | CONFIGS[message]))
    with pytest.raises(ConfigError) as caught:
        adapter_of(path, load(tiny))
    assert message in caught.value.message
    assert (str(path) in caught.value.message, caught.value.param) == (True, "lora")


LAYER = "base_model.model.model.layers"
TENSORS = {
    "is not a low-rank part": {"base_model.model.lm_head.lora_A.weight": (4, 64)},
    "adapts layer 3, and model has 3": {f"{LAYER}.3.mlp.up_proj.lora_{x}.weight": (4, 64) for x in "AB"},
    "its target gate is not one of": {f"{LAYER}.0.mlp.gate.lora_{x}.weight": (4, 64) for x in "AB"},
    "layer 0 down_proj has only one": {f"{LAYER}.0.mlp.down_proj.lora_A.weight": (4, 96)},
}


@pytest.mark.parametrize("message", TENSORS)
def test_tensors_that_do_not_belong_to_the_model(message: str, tiny: Path, tmp_path: Path) -> None:
    path = save_adapter(tmp_path / "a", hf(tiny), targets=("q_proj",))
    file = path / "adapter_model.safetensors"
    save_file(load_file(file) | {name: torch.zeros(shape) for name, shape in TENSORS[message].items()}, file)
    with pytest.raises(ConfigError, match=message):
        adapter_of(path, load(tiny))


def test_files_that_are_missing_or_broken(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json"):
        read_adapter(str(tmp_path / "nothing"), 64)
    for odd in ("/" + "x" * 300, "~nobody-of-that-name/x", "a\0b"):
        with pytest.raises(ConfigError, match="adapter"):
            read_adapter(odd, 64)
    path = save_adapter(tmp_path / "a", hf(tiny))
    (path / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match="cannot read"):
        adapter_of(path, load(tiny))


def test_the_id_is_of_the_content(tiny: Path, tmp_path: Path) -> None:
    model = hf(tiny)
    made = [
        read_adapter(str(save_adapter(tmp_path / name, model, seed=seed, alpha=alpha)), 64)
        for name, seed, alpha in (("a", 1, 8), ("b", 1, 8), ("c", 2, 8), ("d", 1, 4))
    ]
    first, same, other, scaled = (files.id for files in made)
    assert first == same
    assert len({first, other, scaled}) == 3
    assert len(first) == 32
