"""Measures embeddings per second: the engine against one padded batch of transformers, in turns, with the same weights.

    python -m benchmarks.embedding [--model MODEL ...] [--inputs 64] [--rounds 5]

Without --model it uses the demo model, and a random encoder of the shape of all-MiniLM-L6 (6 layers of 384)."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvferry.engine.engine import Engine
from kvferry.engine.events import Generated
from kvferry.engine.models.hf import transformers_module
from kvferry.engine.models.loader import auto_dtype
from kvferry.model_files.pooling_config import PoolingConfig, read_task
from kvferry.model_files.source import ModelSource, resolve
from kvferry.protocol.messages import Job
from kvferry.protocol.settings import WorkerSettings
from kvferry.protocol.work import Embed
from kvferry.worker.engine_factory import assemble

MINILM = {
    "vocab_size": 30_522,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
}
LENGTHS = (8, 40)
"""Tokens of the shortest and the longest input."""


def prompts(count: int, vocabulary: int) -> list[list[int]]:
    """Return random texts with evenly spread lengths; none shares a prefix with another."""
    chosen = torch.Generator().manual_seed(5)
    lengths = torch.linspace(*LENGTHS, count).round().int()[torch.randperm(count, generator=chosen)]
    return [torch.randint(1000, vocabulary, (int(n),), generator=chosen).tolist() for n in lengths]


def by_engine(engine: Engine, texts: Sequence[Sequence[int]], task: PoolingConfig, turn: int) -> torch.Tensor:
    """Return vectors [text, width]; the prefix cache holds none of them."""
    for index, ids in enumerate(texts):
        job = Job(f"{turn}-{index}", 0, tuple(ids), len(ids), Embed(task.pooling), "bench", namespace=str(turn))
        engine.add(job)
    while engine.has_work():
        engine.step()
    found = {e.key[0]: e.delta.vector for e in engine.events if isinstance(e, Generated)}
    engine.events.clear()
    vectors = [torch.frombuffer(bytearray(found[f"{turn}-{i}"] or b""), dtype=torch.float32) for i in range(len(texts))]
    return torch.stack(vectors)


@torch.inference_mode()
def by_transformers(module: Any, texts: Sequence[Sequence[int]], task: PoolingConfig) -> torch.Tensor:
    """Return vectors [text, width] of one padded batch."""
    lengths = torch.tensor([len(ids) for ids in texts])
    places = torch.arange(int(lengths.max()))
    mask = (places < lengths[:, None]).long()
    ids = torch.zeros(mask.shape, dtype=torch.long)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    hidden = module(input_ids=ids, attention_mask=mask).last_hidden_state.float()
    if task.pooling == "mean":
        pooled = (hidden * mask[..., None]).sum(1) / lengths[:, None]
    else:
        pooled = hidden[torch.arange(len(texts)), 0 if task.pooling == "cls" else lengths - 1]
    return torch.nn.functional.normalize(pooled)


def compare(model: str, count: int, rounds: int) -> None:
    """Print medians of both in embeddings per second, and the smallest cosine of their vectors."""
    source = resolve(model)
    task, engine = read_task(source), assemble(WorkerSettings(model=model)).engine
    module, texts = plain(source), prompts(count, engine.runner.model.info.vocab_size)
    seconds: dict[str, list[float]] = {"kvferry": [], "transformers": []}
    cosine = 1.0
    for turn in range(rounds + 1):
        began = time.perf_counter()
        ours = by_engine(engine, texts, task, turn)
        middle = time.perf_counter()
        theirs = by_transformers(module, texts, task)
        if turn:
            seconds["kvferry"].append(middle - began)
            seconds["transformers"].append(time.perf_counter() - middle)
            cosine = min(cosine, float((ours * theirs).sum(1).min()))
    rates = {name: count / statistics.median(values) for name, values in seconds.items()}
    print(
        f"{source.name}, {count} inputs of {LENGTHS[0]} to {LENGTHS[1]} tokens, {task.pooling}: "
        f"kvferry {rates['kvferry']:.0f}/s, transformers {rates['transformers']:.0f}/s "
        f"({rates['kvferry'] / rates['transformers']:.2f} x), least cosine {cosine:.4f}",
        flush=True,
    )


def plain(source: ModelSource) -> Any:
    """Return transformers' own model, in the number format that is fastest here."""
    transformers, dtype = transformers_module(), auto_dtype(torch.device("cpu"), compiled=False)
    if source.kind == "gguf":
        whole = transformers.AutoModelForCausalLM.from_pretrained(
            source.path.parent, gguf_file=source.path.name, dtype=dtype
        )
        return whole.eval().base_model
    return transformers.AutoModel.from_pretrained(source.path, dtype=dtype).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--inputs", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = options.model
        if not models:
            encoder, transformers = Path(folder) / "minilm-shaped", transformers_module()
            transformers.BertModel(transformers.BertConfig(**MINILM)).save_pretrained(encoder)
            models = ["smollm2", str(encoder)]
        for model in models:
            compare(model, options.inputs, options.rounds)


if __name__ == "__main__":
    main()
