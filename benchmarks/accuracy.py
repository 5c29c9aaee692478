"""Measures the accuracy of each weight format against transformers in float32 with the same file's weights.

    python -m benchmarks.accuracy [--llama-quantize PATH] [--gguf FILE...] [--subjects 'q4_*,int8']

`make bench-accuracy` runs it. On a fixed text it measures perplexity, and at how many positions the most likely next
token is the reference's. Then it continues prompts cut from that text greedily, and counts the tokens before the first
that differs from the reference's. It prints the table of docs/benchmarks.md."""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import FORMATS, SOURCE, find_models, on_path
from benchmarks.table import markdown
from kvferry.cli.bootstrap import set_threads
from kvferry.engine.engine import Engine
from kvferry.engine.events import Generated
from kvferry.engine.models.hf import transformers_module
from kvferry.protocol.messages import Job, TokenLogprobs
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.settings import RouterSettings, WorkerSettings
from kvferry.protocol.work import Generate
from kvferry.router.text.loader import load_text_model
from kvferry.runtime.limits import available_cores
from kvferry.worker.engine_factory import assemble

PROSE = Path(__file__).with_name("prose.txt")
PROMPTS, PROMPT_LEN, CONTINUED = 8, 64, 64
"""Continuations, and prompt and output tokens of each."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Model file with the settings of a worker; subjects with settings that this version lacks are skipped."""

    name: str
    model: str
    settings: dict[str, Any]


SUBJECTS = (
    Subject("bf16", SOURCE, {"quantization": "none"}),
    Subject("int8", SOURCE, {"quantization": "int8"}),
    Subject("bf16, int8 KV cache", SOURCE, {"quantization": "none", "kv_cache_dtype": "int8"}),
    Subject("bf16, fp8 KV cache", SOURCE, {"quantization": "none", "kv_cache_dtype": "fp8"}),
    *(Subject(name, name, {}) for name in FORMATS if name != "bf16"),
)


@dataclass(frozen=True, slots=True)
class Answers:
    """Output of one model for the text.

    logprobs: natural logarithms, of each token but the first; best: the most likely token at each position;
    continuations: greedy tokens by prompt."""

    logprobs: list[float]
    best: list[int]
    continuations: list[list[int]]

    @property
    def perplexity(self) -> float:
        return math.exp(-statistics.fmean(self.logprobs))


def shared(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def agreement(ours: Answers, theirs: Answers) -> tuple[float, float]:
    """Return the share of positions with the same most likely token, and the mean common prefix of continuations."""
    same = statistics.fmean(a == b for a, b in zip(ours.best, theirs.best, strict=True))
    pairs = zip(ours.continuations, theirs.continuations, strict=True)
    return same, statistics.fmean(shared(a, b) for a, b in pairs)


def prompts_of(tokens: Sequence[int]) -> list[list[int]]:
    """Cut prompts of equal length at equal distances from the text."""
    stride = (len(tokens) - PROMPT_LEN) // (PROMPTS - 1)
    return [list(tokens[i * stride : i * stride + PROMPT_LEN]) for i in range(PROMPTS)]


def ask_engine(engine: Engine, tokens: Sequence[int]) -> Answers:
    """Score the text in the engine's chunks and continue all prompts in one batch."""
    greedy = SamplingParams(max_tokens=CONTINUED, temperature=0.0, ignore_eos=True)
    score = replace(greedy, max_tokens=1, prompt_logprobs=1)
    engine.add(Job("text", 0, tuple(tokens), len(tokens), Generate(score), "accuracy"))
    for i, prompt in enumerate(prompts_of(tokens)):
        engine.add(Job(str(i), 0, tuple(prompt), len(prompt), Generate(greedy), "accuracy"))
    while engine.has_work():
        engine.step()
    made, scored = defaultdict[str, list[int]](list), list[TokenLogprobs | None]()
    for event in engine.events:
        if isinstance(event, Generated):
            made[event.key[0]] += event.delta.token_ids
            scored += event.delta.prompt_logprobs or ()
    entries = [entry for entry in scored if entry is not None]
    assert len(entries) == len(tokens) - 1
    best = [entry.top[0][0] for entry in entries]
    return Answers([entry.logprob for entry in entries], best, [made[str(i)] for i in range(PROMPTS)])


@torch.inference_mode()
def ask_transformers(path: Path, tokens: Sequence[int]) -> Answers:
    """Compute the answers of transformers with the file's weights, dequantised, in float32."""
    model = transformers_module().AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True
    )
    text = torch.tensor([tokens])
    logprobs = model(text).logits[0, :-1].log_softmax(-1)
    prompts = torch.tensor(prompts_of(tokens))
    output = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=CONTINUED, eos_token_id=-1
    )
    of_tokens = logprobs.gather(1, text[0, 1:, None])[:, 0]
    return Answers(of_tokens.tolist(), logprobs.argmax(-1).tolist(), output[:, PROMPT_LEN:].tolist())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--subjects", default="*", help="patterns; all: " + ", ".join(s.name for s in SUBJECTS))
    parser.add_argument("--gguf", type=Path, nargs="+", default=[], help="model files instead of the demo model")
    parser.add_argument("--llama-quantize", type=Path, default=on_path("llama-quantize"))
    return parser.parse_args()


def main() -> None:
    options = parse()
    set_threads(options.threads)
    torch.set_num_threads(options.threads)
    models = find_models(options.gguf, options.llama_quantize, None, vllm=False)
    tokens = load_text_model(RouterSettings(model=(str(models[SOURCE]),))).encode(PROSE.read_text())
    references: dict[str, Answers] = {}
    rows = []
    for subject in SUBJECTS:
        unknown = [name for name in subject.settings if not hasattr(WorkerSettings, name)]
        selected = any(fnmatch(subject.name, pattern) for pattern in options.subjects.split(","))
        if not selected or unknown or subject.model not in models:
            reason = (
                f"no setting {unknown[0]}" if unknown else f"no {subject.model} model" if selected else "not selected"
            )
            print(f"{subject.name} is skipped: {reason}", file=sys.stderr)
            continue
        path = models[subject.model]
        if subject.model not in references:
            references[subject.model] = ask_transformers(path, tokens)
        settings = WorkerSettings(
            model=str(path), dtype="bfloat16", threads=options.threads, kv_cache_gib=0.25, **subject.settings
        )
        ours, theirs = ask_engine(assemble(settings).engine, tokens), references[subject.model]
        gc.collect()
        same, length = agreement(ours, theirs)
        rows.append(
            (
                subject.name,
                f"{ours.perplexity:.2f}",
                f"{theirs.perplexity:.2f}",
                f"{100 * same:.1f} %",
                f"{length:.0f} of {CONTINUED}",
            )
        )
        print(" ".join(rows[-1]), file=sys.stderr)
    print(f"{len(tokens)} tokens of text, {PROMPTS} continuations")
    head = ("weights", "perplexity", "transformers float32", "same most likely token", "equal greedy continuation")
    print(markdown(head, rows))


if __name__ == "__main__":
    main()
