"""Makes the table of model families: names and notes are listed here, the other cells come from the engine's rows."""

from __future__ import annotations

from dataclasses import dataclass

from docs.markdown import markdown_table
from kvferry.engine.models.families import FAMILIES
from kvferry.engine.models.family import Family
from kvferry.engine.models.hybrid_families import HYBRIDS


@dataclass(frozen=True, slots=True)
class Entry:
    """Row of the table. types: values of model_type, alike in how they run. note: about their formats."""

    names: str
    types: tuple[str, ...]
    note: str = ""


_RECURRENT = "no adapters of recurrent layers; one rank"
ENTRIES = (
    Entry(
        "**Llama** (2 and 3, SmolLM2 and others of its form), **Mistral**, **Qwen2** and 2.5, **Qwen3**, **SmolLM3**",
        ("llama", "mistral", "qwen2", "qwen3", "smollm3"),
    ),
    Entry(
        "**GLM-4** (9B, the first), **Ernie 4.5** (dense), **Seed-OSS**, **Arcee** (AFM), **Apertus**, **Granite** 3 "
        "(dense)",
        ("glm", "ernie4_5", "seed_oss", "arcee", "apertus", "granite"),
    ),
    Entry(
        "**Ministral 3**, **Mistral Small 3** in GGUF",
        ("ministral3",),
        "layer by layer beyond its original context",
    ),
    Entry("**Ministral** (8B of 2024)", ("ministral",)),
    Entry("**Phi-3** and Phi-4, mini too", ("phi3",), "longrope's factors from tensors of a GGUF"),
    Entry("**Helium**", ("helium",)),
    Entry("**Command-R**, Command-R+, Aya (Cohere), **Command-R7B** and Command-A (Cohere 2)", ("cohere", "cohere2")),
    Entry(
        "**Exaone 4**, **Hunyuan** (dense), **Nemotron** (and Minitron), **OLMo** (the first), **StableLM**, "
        "**StarCoder 2**",
        ("exaone4", "hunyuan_v1_dense", "nemotron", "olmo", "stablelm", "starcoder2"),
    ),
    Entry(
        "**Gemma**, **Gemma 2**, **Gemma 3** (text: 270M and 1B), **OLMo 2** and 3, **GLM-4** (0414), **Phi** (1 to 2)",
        ("gemma", "gemma2", "gemma3_text", "olmo2", "olmo3", "glm4", "phi"),
    ),
    Entry(
        "**Gemma 3n** (E2B, E4B) and **Gemma 4** (all sizes, its experts too): layers of their own heads and dims, "
        "K/V that layers share, inputs of each layer",
        ("gemma3n_text", "gemma4_text"),
        "one rank; what they see and hear is neither loaded nor taken in requests",
    ),
    Entry(
        "mixtures of experts: **Qwen2-MoE**, **Qwen3-MoE** (30B-A3B and others), **Mixtral**, **OLMoE**, **GLM-4.5** "
        "to 4.7, **Ernie 4.5** (A3B and A47B), **MiniMax-M2**, **K-Exaone**, **Hunyuan** (A13B)",
        (
            *("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "glm4_moe", "ernie4_5_moe", "minimax_m2", "exaone_moe"),
            "hunyuan_v1_moe",
        ),
        "each expert's packed layers run once a step",
    ),
    Entry(
        "**Phi-3.5-MoE**",
        ("phimoe",),
        "longrope's factors from tensors of a GGUF; each expert's packed layers run once a step",
    ),
    Entry(
        "**Granite** 3 (experts), **Llama 4** (its text), **Qwen3-VL** (experts, with images)",
        ("granitemoe", "granitemoeshared", "llama4_text", "qwen3_vl_moe_text"),
        "each expert's packed layers run once a step",
    ),
    Entry(
        "**gpt-oss** (20B and 120B): attention sinks, windows of 128, experts in MXFP4",
        ("gpt_oss",),
        "experts in MXFP4 or plain",
    ),
    Entry(
        "**DeepSeek V2**, V2-Lite, V2.5 and **V3**, R1, **GLM-4.7 Flash**: latent attention, of which one vector "
        "a token and layer is cached (1,152 bytes in bfloat16)",
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
        "V3's fp8 blocks; where a GGUF tells of no groups of experts, they are chosen among all; the cache in fp8",
    ),
    Entry(
        "recurrent layers beside attention: **LFM2** and 2.5 (short convolutions), **Qwen3.5** (gated delta rule)",
        ("lfm2", "qwen3_5_text"),
        f"{_RECURRENT}; images of LFM2-VL are refused; GGUF files whose value heads take turns over fewer key heads "
        "layer by layer",
    ),
    Entry("the same: **Falcon-H1** (Mamba 2)", ("falcon_h1",), _RECURRENT),
    Entry(
        "the same with experts: **LFM2**, **Qwen3-Next**, **Jamba**, **Nemotron-H** and Nemotron 3 (Super, too; dense "
        "ones, too)",
        ("lfm2_moe", "qwen3_next", "jamba", "nemotron_h"),
        _RECURRENT,
    ),
    Entry("**Qwen3.5** (experts)", ("qwen3_5_moe_text",), _RECURRENT),
    Entry("**Granite 4** (dense ones, too)", ("granitemoehybrid",), f"{_RECURRENT}; those with experts layer by layer"),
    Entry("**Bamba** (Mamba 2)", ("bamba",), f"GGUF as Granite 4; {_RECURRENT}"),
    Entry("**MiniMax-01** (lightning attention)", ("minimax",), _RECURRENT),
    Entry(
        "**Qwen2-VL**, **Qwen2.5-VL** and **Qwen3-VL** (dense); the text of **Gemma 3** from 4B on, **Mistral Small "
        "3.1** and later, **Ministral 3**, **Idefics 3**, **SmolVLM**, **Qwen3.5**, **Qwen2-Audio** and **Voxtral** "
        "runs as their families of text",
        ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl_text"),
        "with images, Qwen2-Audio and Voxtral with audio, from safetensors: towers and processors are those of "
        "transformers",
    ),
)
_REPLAYED = ("lfm2", "qwen3_5_text", "granitemoehybrid", "bamba")
"""Families with recurrent layers whose decode steps the CPU kernels replay."""
_OTHERS = (
    (
        "GPT-2, GPT-NeoX, OPT, and what else uses transformers' attention interface",
        "transformers' modules around our attention; on a CPU in bfloat16 dense layers are ours, too; several times "
        "slower for one stream than our decoder",
        "safetensors, `.bin`, with `accelerate` installed GGUF that transformers knows, in its block formats; int8; "
        "quantised checkpoints; experts in PyTorch, in float32 and not in codes",
        "none",
    ),
    (
        "Falcon, Bloom, MPT, other multimodal checkpoints, latent attention of other families (Kimi K2, "
        "MiniCPM 3), state-space models without attention, encoder-decoder models",
        "refused by name",
        "",
        "",
    ),
)


def families_table() -> str:
    """Return a row for each entry. Raises ValueError where an entry's families do not run alike."""
    rows = [(entry.names, *_described(entry)) for entry in ENTRIES]
    return markdown_table(("family", "path", "formats", "adapters"), [*rows, *_OTHERS])


def _described(entry: Entry) -> tuple[str, str, str]:
    found = {(_path(kind), _formats(FAMILIES[kind]), _adapters(FAMILIES[kind])) for kind in entry.types}
    if len(found) > 1:
        raise ValueError(f"families of one row differ: {entry.types}")
    ((path, formats, adapters),) = found
    return path, f"{formats}; {entry.note}" if entry.note else formats, adapters


def _path(kind: str) -> str:
    family = FAMILIES[kind]
    if kind in _REPLAYED:
        return "our decoder; on a CPU a decode step is one call"
    one_call = family.plain and family.experts is None and kind not in HYBRIDS
    return "our decoder; on a CPU a step is one call" if one_call else "our decoder, layer by layer"


def _formats(family: Family) -> str:
    """Quantised checkpoints hold experts in codes only where each is a tensor of its own."""
    formats = ["safetensors", "`.bin`"]
    if family.gguf:
        formats.append("GGUF (split files, too) with its block formats as stored")
    return ", ".join(formats) + "; int8" + ("" if family.stack else "; quantised checkpoints")


def _adapters(family: Family) -> str:
    if family.latent:
        return "none"
    return "attention" if family.experts else "attention and MLP"
