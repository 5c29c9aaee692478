"""Tiny random models of each family, transformers' logits of them, and ours through a paged cache."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from kvferry.engine.models.base import KeepGoing, Model, SuspendedPass
from kvferry.engine.models.hf import transformers_module
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.decoder_step import always
from kvferry.kernels.quantised_cache import PEAKS
from kvferry.kernels.sequence_state import SequenceStates
from tests.device_plans import moved
from tests.once_a_run import RUN

transformers = transformers_module()

BLOCK = 8
ROWS = 16
"""Rows of recurrent states in a test's pool, two for each sequence."""
VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 1.9, 2.0, 2.5, 2.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 9.0, 12.0],
}
GEMMA2 = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 9,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
GEMMA3 = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
HALVES = ["sliding_attention", "full_attention"]
GEMMA3N = {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "sliding_window": 9,
    "layer_types": HALVES * 3,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB - 7,
    "laurel_rank": 12,
    "activation_sparsity_pattern": [0.4, 0.7, 0.0, 0.0, 0.2, 0.0],
    "intermediate_size": [96, 64, 96, 96, 32, 96],
    "final_logit_softcapping": 3.0,
}
GEMMA4 = {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 9,
    "layer_types": HALVES * 3,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "use_double_wide_mlp": True,
}
GEMMA4_LARGE = GEMMA4 | {
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 3.0,
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 24}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.3,
    "logits_scaling": 0.7,
}
COHERE = {"logit_scale": 0.25, "tie_word_embeddings": True, "pad_token_id": 0, "layer_norm_eps": 1e-3}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "rms_norm_eps": 1e-3,
    "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 1.1},
}
DEEPSEEK_GROUPS = DEEPSEEK | {"n_group": 4, "topk_group": 2}
LLAMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "attention_chunk_size": 12,
    "floor_scale": 7,
    "attn_scale": 0.3,
}
GLM_LITE = {name: value for name, value in DEEPSEEK.items() if name != "first_k_dense_replace"} | {
    "num_key_value_heads": 4
}
GPT_OSS = {
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 9,
    "swiglu_limit": 1.5,
    "pad_token_id": 0,
    "rope_parameters": YARN | {"truncate": False},
}


GLM_MOE = {
    "head_dim": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
}
QWEN2_MOE = EXPERTS | {"shared_expert_intermediate_size": 40}
ERNIE_MOE = {
    "moe_num_experts": 6,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "moe_layer_start_index": 1,
    "num_hidden_layers": 4,
}
MINIMAX_M2 = {
    "head_dim": 32,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}


def family(name: str, **settings):
    return getattr(transformers, name)(**(SHAPE | settings))


OURS = {
    "llama2": lambda: family("LlamaConfig", num_key_value_heads=4),
    "llama-tied-biased": lambda: family(
        "LlamaConfig", tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=32
    ),
    "llama3": lambda: family("LlamaConfig", rope_parameters=LLAMA3),
    "llama-linear": lambda: family("LlamaConfig", rope_parameters={"rope_type": "linear", "factor": 2.0}),
    "llama-dynamic": lambda: family("LlamaConfig", rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
    "llama-yarn": lambda: family("LlamaConfig", rope_parameters=YARN),
    "mistral-window": lambda: family("MistralConfig", sliding_window=11),
    "mistral": lambda: family("MistralConfig", sliding_window=None, head_dim=8),
    "qwen2": lambda: family("Qwen2Config"),
    "qwen2-window": lambda: family("Qwen2Config", use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen2-yarn": lambda: family("Qwen2Config", rope_parameters=YARN | {"beta_fast": 8.0, "attention_factor": 1.3}),
    "qwen3": lambda: family("Qwen3Config", head_dim=32, tie_word_embeddings=True),
    "qwen3-biased": lambda: family("Qwen3Config", head_dim=16, attention_bias=True),
    "phi3": lambda: family("Phi3Config", pad_token_id=0, sliding_window=None),
    "phi3-window-partial": lambda: family(
        "Phi3Config",
        pad_token_id=0,
        sliding_window=9,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    ),
    "phi3-long": lambda: family(
        "Phi3Config", pad_token_id=0, rope_parameters=LONGROPE, original_max_position_embeddings=16
    ),
    "gemma": lambda: family("GemmaConfig", head_dim=32, num_key_value_heads=1, tie_word_embeddings=True),
    "gemma2": lambda: family("Gemma2Config", num_hidden_layers=4, tie_word_embeddings=True, **GEMMA2),
    "gemma2-uncapped": lambda: family(
        "Gemma2Config", **GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    ),
    "gemma3": lambda: family("Gemma3TextConfig", num_hidden_layers=4, tie_word_embeddings=True, **GEMMA3),
    "gemma3-linear": lambda: family(
        "Gemma3TextConfig",
        num_hidden_layers=4,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        **GEMMA3,
    ),
    "gemma3n": lambda: family("Gemma3nTextConfig", **GEMMA3N),
    "gemma3n-unshared": lambda: family(
        "Gemma3nTextConfig",
        tie_word_embeddings=True,
        **GEMMA3N | {"num_kv_shared_layers": 0, "altup_active_idx": 1, "altup_num_inputs": 3},
    ),
    "gemma4": lambda: family("Gemma4TextConfig", tie_word_embeddings=True, **GEMMA4),
    "gemma4-biased": lambda: family("Gemma4TextConfig", attention_bias=True, **GEMMA4),
    "gemma4-large": lambda: family("Gemma4TextConfig", **GEMMA4_LARGE),
    "gemma4-experts": lambda: family("Gemma4TextConfig", **GEMMA4_LARGE, **GEMMA4_EXPERTS),
    "olmo2": lambda: family("Olmo2Config", pad_token_id=0),
    "olmo3": lambda: family(
        "Olmo3Config",
        pad_token_id=0,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "glm4": lambda: family("Glm4Config", head_dim=16, pad_token_id=0, attention_bias=True),
    "cohere": lambda: family("CohereConfig", logit_scale=0.25, tie_word_embeddings=True, pad_token_id=0),
    "cohere-plus": lambda: family("CohereConfig", use_qk_norm=True, attention_bias=True, **COHERE),
    "cohere2": lambda: family("Cohere2Config", num_hidden_layers=4, sliding_window=9, **COHERE),
    "cohere2-pattern": lambda: family(
        "Cohere2Config",
        sliding_window=11,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        **COHERE,
    ),
    "granite": lambda: family("GraniteConfig", tie_word_embeddings=True, **GRANITE),
    "granite-biased": lambda: family("GraniteConfig", attention_bias=True, mlp_bias=True, **GRANITE),
    "qwen3-moe": lambda: family("Qwen3MoeConfig", head_dim=16, norm_topk_prob=True, **EXPERTS),
    "qwen3-moe-one-dense": lambda: family("Qwen3MoeConfig", head_dim=16, mlp_only_layers=[1], **EXPERTS),
    "qwen3-moe-window": lambda: family(
        "Qwen3MoeConfig", head_dim=16, decoder_sparse_step=2, use_sliding_window=True, sliding_window=9, **EXPERTS
    ),
    "mixtral": lambda: family("MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    "mixtral-window": lambda: family("MixtralConfig", num_local_experts=3, num_experts_per_tok=3, sliding_window=11),
    "olmoe": lambda: family("OlmoeConfig", num_experts=6, num_experts_per_tok=3, pad_token_id=0),
    "gpt-oss": lambda: family("GptOssConfig", num_hidden_layers=4, **GPT_OSS),
    "gpt-oss-plain": lambda: family(
        "GptOssConfig",
        **GPT_OSS | {"attention_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "deepseek-v2-lite": lambda: family("DeepseekV2Config", q_lora_rank=None, **DEEPSEEK),
    "deepseek-v2": lambda: family(
        "DeepseekV2Config",
        q_lora_rank=20,
        topk_method="group_limited_greedy",
        attention_bias=True,
        **DEEPSEEK_GROUPS | {"v_head_dim": 32, "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek-v3": lambda: family("DeepseekV3Config", q_lora_rank=20, **DEEPSEEK_GROUPS),
    "deepseek-v3-halves": lambda: family(
        "DeepseekV3Config",
        q_lora_rank=None,
        rope_interleave=False,
        norm_topk_prob=False,
        **DEEPSEEK | {"n_group": 1, "topk_group": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "glm4-moe": lambda: family(
        "Glm4MoeConfig", use_qk_norm=True, attention_bias=True, n_group=4, topk_group=2, **GLM_MOE
    ),
    "glm4-moe-plain": lambda: family("Glm4MoeConfig", first_k_dense_replace=2, n_shared_experts=2, **GLM_MOE),
    "glm4-moe-lite": lambda: family(
        "Glm4MoeLiteConfig",
        q_lora_rank=20,
        n_group=2,
        topk_group=1,
        mlp_layer_types=["dense", "sparse", "sparse"],
        **GLM_LITE,
    ),
    "qwen2-moe": lambda: family("Qwen2MoeConfig", norm_topk_prob=True, **QWEN2_MOE),
    "qwen2-moe-unbiased": lambda: family("Qwen2MoeConfig", qkv_bias=False, mlp_only_layers=[0], **QWEN2_MOE),
    "minimax-m2": lambda: family("MiniMaxM2Config", **MINIMAX_M2),
    "ernie-moe": lambda: family("Ernie4_5_MoeConfig", tie_word_embeddings=True, **ERNIE_MOE),
    "ernie-moe-alone": lambda: family(
        "Ernie4_5_MoeConfig", moe_num_shared_experts=0, moe_norm_min=0.4, moe_layer_interval=2, **ERNIE_MOE
    ),
    "granite-moe": lambda: family("GraniteMoeConfig", num_local_experts=6, num_experts_per_tok=3, **GRANITE),
    "granite-moe-shared": lambda: family(
        "GraniteMoeSharedConfig",
        num_local_experts=6,
        num_experts_per_tok=3,
        shared_intermediate_size=40,
        attention_bias=True,
        tie_word_embeddings=True,
        **GRANITE,
    ),
    "ernie-moe-biased": lambda: family("Ernie4_5_MoeConfig", use_bias=True, **ERNIE_MOE),
    "hunyuan-moe": lambda: family(
        "HunYuanMoEV1Config",
        head_dim=16,
        num_experts=6,
        moe_topk=3,
        pad_token_id=0,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "alpha": 50.0, "factor": 1.0},
    ),
    "phi-moe": lambda: family(
        "PhimoeConfig",
        num_local_experts=6,
        lm_head_bias=True,
        attention_bias=True,
        router_jitter_noise=0.2,
        rope_parameters=LONGROPE | {"short_mscale": 1.2, "long_mscale": 1.3, "original_max_position_embeddings": 128},
    ),
    "phi-moe-window": lambda: family("PhimoeConfig", num_local_experts=4, sliding_window=9, router_jitter_noise=0.4),
    "exaone-moe": lambda: family(
        "ExaoneMoeConfig",
        num_hidden_layers=4,
        sliding_window=9,
        sliding_window_pattern=2,
        n_group=4,
        topk_group=2,
        num_experts=8,
        routed_scaling_factor=1.5,
        **{name: GLM_MOE[name] for name in ("head_dim", "moe_intermediate_size", "num_experts_per_tok")},
    ),
    "llama4": lambda: family("Llama4TextConfig", rope_parameters=LLAMA3, **LLAMA4),
    "llama4-dense-between": lambda: family(
        "Llama4TextConfig",
        interleave_moe_layer_step=2,
        num_experts_per_tok=2,
        use_qk_norm=False,
        attention_bias=True,
        no_rope_layers=[1, 0, 1, 0],
        **LLAMA4,
    ),
    "llama4-whole": lambda: family(
        "Llama4TextConfig",
        attn_temperature_tuning=False,
        moe_layers=[0, 3],
        tie_word_embeddings=True,
        **LLAMA4 | {"attention_chunk_size": None},
    ),
    "smollm3": lambda: family("SmolLM3Config", no_rope_layers=[1, 0, 1], pad_token_id=0, tie_word_embeddings=True),
    "smollm3-window": lambda: family(
        "SmolLM3Config", no_rope_layer_interval=2, use_sliding_window=True, sliding_window=9, pad_token_id=0
    ),
}


_HERE = tempfile.TemporaryDirectory()
_ORACLE: list[Any] = []
"""What `oracle_logits` was asked for last, files' times included, and the model."""


def save_tiny(config, path) -> None:
    """Random weights, norms and biases included, under `path`.

    A run makes each checkpoint once: making it takes as long as what most tests do with it."""
    asked = f"{type(config).__name__} {config.to_json_string(use_diff=False)}"
    kept = Path(os.environ.get(RUN) or _HERE.name) / f"tiny-{sha256(asked.encode()).hexdigest()[:32]}"
    if not kept.exists():
        made = kept.with_suffix(f".{os.getpid()}")
        _make_tiny(config, made / "model")
        torch.save(torch.get_rng_state(), made / "random")
        with contextlib.suppress(OSError):  # another process was faster
            made.rename(kept)
    shutil.copytree(kept / "model", path, dirs_exist_ok=True)
    torch.set_rng_state(torch.load(kept / "random"))


def _make_tiny(config, path) -> None:
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter.normal_(0.8, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.3)
            if name.endswith("layer_scalar"):
                buffer.normal_(0.8, 0.2)
    model.save_pretrained(path)


def tokens_for(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def oracle_logits(path, tokens: torch.Tensor, **extra) -> torch.Tensor:
    """transformers' own attention, one pass over the whole sequence, float32 [T, vocabulary].

    The latest model is kept: a test asks it several times, and reading it takes longer than its answer."""
    files = sorted((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in Path(path).iterdir())
    asked = (path, files, extra)
    if _ORACLE[:1] != [asked]:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", **extra
        )
        _ORACLE[:] = [asked, model.eval()]
    return _ORACLE[1](input_ids=tokens[None]).logits[0].float()


def plan_of(parts: list[tuple[list[int], int, int]]) -> BatchPlan:
    """Plan of (block ids, computed length, tokens) per sequence, decodes first."""
    width = max(len(blocks) for blocks, _, _ in parts)
    positions = [torch.arange(start, start + count) for _, start, count in parts]
    slots = [
        torch.tensor(blocks)[p // BLOCK] * BLOCK + p % BLOCK for (blocks, _, _), p in zip(parts, positions, strict=True)
    ]
    counts, totals = [count for _, _, count in parts], [start + count for _, start, count in parts]
    return BatchPlan(
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        block_table=torch.tensor([blocks + [0] * (width - len(blocks)) for blocks, _, _ in parts], dtype=torch.int32),
        query_start=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
        total_len=torch.tensor(totals, dtype=torch.int32),
        query_lens=tuple(counts),
        total_lens=tuple(totals),
        num_decodes=sum(count == 1 for count in counts),
        block_size=BLOCK,
    )


class Cache:
    """A pool of garbage and the sequences that live in it, in scattered blocks."""

    def __init__(self, model: Model, blocks: int = 64, dtype: torch.dtype | None = None):
        dtype = dtype or model.dtype
        layout = model.info.layout(dtype, BLOCK)
        self.model = model
        self.kv = torch.full(
            (blocks, *layout.block_shape), 99 if dtype in PEAKS else 1e4, dtype=dtype, device=model.device
        )
        self.free = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).tolist()
        self.blocks: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.states = torch.full((ROWS, model.info.state_floats), 1e4, device=model.device)
        self.rows: dict[str, tuple[int, int]] = {}
        self.suspended: SequenceStates | None = None

    def state_rows(self, names: Iterable[str]) -> SequenceStates | None:
        """Two rows of each sequence, which alternate: the state before these tokens and the one after them."""
        if not self.model.info.state_floats:
            return None
        before, after = [], []
        for name in names:
            old, new = self.rows.get(name) or (2 * len(self.rows) + 1, 2 * len(self.rows))
            before.append(old if self.computed.get(name) else -1)
            after.append(new)
            self.rows[name] = new, old
        return SequenceStates(self.states, torch.tensor(before), torch.tensor(after))

    def planned(self, plan: BatchPlan, batch: dict[str, torch.Tensor]) -> BatchPlan:
        """The plan of these tokens, which count as computed already."""
        return plan

    @torch.inference_mode()
    def step(
        self,
        batch: dict[str, torch.Tensor],
        keep_going: KeepGoing = always,
        halfway: SuspendedPass | None = None,
    ) -> list[torch.Tensor]:
        """Compute the next tokens of each named sequence; their logits [count, vocabulary], in the batch's order."""
        parts, states = [], self.state_rows(batch) if halfway is None else self.suspended
        for name, tokens in batch.items():
            start, blocks = self.computed.get(name, 0), self.blocks.setdefault(name, [])
            while len(blocks) * BLOCK < start + len(tokens):
                blocks.append(self.free.pop())
            parts.append((blocks, start, len(tokens)))
            self.computed[name] = start + len(tokens)
        tokens, plan = torch.cat(list(batch.values())), self.planned(replace(plan_of(parts), states=states), batch)
        self.suspended = states
        if self.kv.is_cuda:
            tokens, plan = tokens.to(self.kv.device), moved(plan, self.kv.device)
        hidden = self.model.forward(tokens, self.kv, plan, keep_going, halfway)
        return list(self.model.logits(hidden).cpu().split([len(tokens) for tokens in batch.values()]))


def chunked_logits(
    model: Model, tokens: torch.Tensor, chunks: list[int], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Logits of one sequence computed in chunks of the given lengths; dtype: of the cache, None: the model's."""
    cache = Cache(model, dtype=dtype)
    return torch.cat([cache.step({"a": chunk})[0] for chunk in tokens.split(chunks)])


def expect_equal_logits(model: Model, oracle, tolerance: float = 2e-4) -> None:
    """One chunk; several chunks; decode steps; decodes of two sequences beside the chunked prefill of a third: each
    equals `oracle(tokens)`."""
    first, second, third = tokens_for(45, 1), tokens_for(19, 2), tokens_for(30, 3)
    expected = oracle(first)
    assert expected.std() > 0.1, "the oracle's logits must tell tokens apart"
    for chunks in ([45], [16, 7, 22], [8, 1, 20, 16], [30] + [1] * 15):
        torch.testing.assert_close(chunked_logits(model, first, chunks), expected, rtol=tolerance, atol=tolerance)
    cache, got = Cache(model), {"a": [], "b": [], "c": []}
    steps = [{"a": first[:40], "b": second[:14]}]
    steps += [
        {"a": first[40 + i : 41 + i], "b": second[14 + i : 15 + i], "c": third[6 * i : 6 * i + 6]} for i in range(5)
    ]
    for batch in steps:
        for name, logits in zip(batch, cache.step(batch), strict=True):
            got[name].append(logits)
    for name, tokens in {"a": first, "b": second, "c": third}.items():
        torch.testing.assert_close(torch.cat(got[name]), oracle(tokens), rtol=tolerance, atol=tolerance)
