"""Measures whole steps of a model of random weights on one device, against the device's limits.

    python -m benchmarks.gpu_steps [--tiny] [--rows FILE]

A step is what the engine's runner does, from its slices to the drawn tokens on the host: planning, upload, all layers,
drawing. The lower bound of a decode step is the time in which the device reads the weights that it needs and the K/V of
its context; that of a prompt is the time of its operations at the rate of a large matrix product. Both limits are
measured first."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch

from benchmarks.gpu_limits import Limits, limits, median_seconds
from benchmarks.gpu_models import LARGE, MIXTURE, TINY, TINY_MIXTURE, write_model
from benchmarks.gpu_rows import Rows
from kvferry.engine.models import load_model
from kvferry.engine.models.base import Model
from kvferry.engine.request import Request
from kvferry.engine.runner import Runner
from kvferry.engine.step_slices import Slice
from kvferry.kernels.ops import select
from kvferry.model_files.memory_needs import ModelNeeds, config_needs
from kvferry.model_files.unsupported_models import resolve_runnable
from kvferry.protocol.layout import blocks_for
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate

BLOCK = 16


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top_k 50, top_p 0.9 of a peaked distribution": {"temperature": 0.02, "top_k": 50, "top_p": 0.9},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "logit_bias": ((3, 1.0),)},
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the steps.

    decodes: (batch, context); prompts: tokens; copied, side: of the limits; runs: of each step."""

    config: dict[str, Any]
    decodes: tuple[tuple[int, int], ...]
    prompts: tuple[int, ...]
    copied: int
    side: int
    runs: int


FULL = Sizes(LARGE, ((1, 2048), (64, 2048)), (8192,), 1 << 30, 8192, 30)
SMALL = Sizes(TINY, ((1, 64), (4, 64)), (128,), 1 << 20, 128, 3)
FULL_MIXTURE, SMALL_MIXTURE = replace(FULL, config=MIXTURE), replace(SMALL, config=TINY_MIXTURE)
MODELS = (
    ("none", FULL, SMALL, ""),
    ("int8", FULL, SMALL, ", weights in int8"),
    ("none", FULL_MIXTURE, SMALL_MIXTURE, ", mixture"),
)
"""Quantisation of the weights, sizes in full and small, and the name in the rows."""


class Bench:
    """One model, its runner, and the limits that it is measured against."""

    def __init__(self, sizes: Sizes, device: torch.device, folder: Path, quantization: str = "none") -> None:
        self.sizes, self.device, self.int8 = sizes, device, quantization == "int8"
        ops = select("auto", device)
        source = resolve_runnable(str(write_model(folder, sizes.config)), "dummy")
        self.dtype = torch.bfloat16
        self.model: Model = load_model(
            source, device=device, dtype=self.dtype, ops=ops, load_format="dummy", quantization=quantization
        )
        self.limits: Limits = limits(device, self.dtype, sizes.copied, sizes.side)
        self.needs: ModelNeeds = config_needs(sizes.config)
        spare = 2 + sizes.runs // BLOCK
        sequences = [blocks_for(context, BLOCK) + spare for batch, context in sizes.decodes for _ in range(batch)]
        longest = max([sum(sequences), *(blocks_for(tokens, BLOCK) for tokens in sizes.prompts)])
        layout = self.model.info.layout(self.dtype, BLOCK)
        self.kv = torch.zeros(longest, *layout.block_shape, dtype=self.dtype, device=device)
        self.runner = Runner(self.model, self.kv, BLOCK)

    def request(self, name: str, tokens: int, first_block: int, spare: int, computed: int, **sampling: Any) -> Request:
        """Return a request that owns its blocks from `first_block` on."""
        prompt = prompt_of(name, tokens, self.model.info.vocab_size)
        params = SamplingParams(max_tokens=self.sizes.runs + 8, ignore_eos=True, seed=crc32(name.encode()), **sampling)
        request = Request(Job(name, 0, prompt, tokens, Generate(params), "bench"), b"", BLOCK)
        request.token_ids, request.computed_len = list(prompt), computed
        request.block_ids = list(range(first_block, first_block + blocks_for(tokens, BLOCK) + spare))
        return request

    def decode(self, batch: int, context: int, **sampling: Any) -> tuple[float, float]:
        """Return the seconds of a decode step, and its lower bound."""
        spare = 2 + self.sizes.runs // BLOCK
        each = blocks_for(context, BLOCK) + spare
        streams = [self.request(f"s{i}", context, i * each, spare, context - 1, **sampling) for i in range(batch)]
        taken = [self._step(streams) for _ in range(self.sizes.runs + 2)][2:]
        itemsize = self.dtype.itemsize
        weights = self.needs.step_bytes(itemsize) - self.int8 * (itemsize - 1) * self.needs.dense.active
        weights += itemsize * self._further_experts(batch)
        moved = weights + batch * context * self.needs.kv_bytes("bfloat16")
        return statistics.median(taken), moved / self.limits.bandwidth

    def _further_experts(self, batch: int) -> float:
        """Return the expert weights that a step of `batch` tokens is expected to read beyond those of one token."""
        count = self.sizes.config.get("num_experts", 0)
        if not count:
            return 0.0
        share = self.sizes.config["num_experts_per_tok"] / count
        all_experts = (self.needs.dense.weights - self.needs.dense.active) / (1 - share)
        return float(all_experts * (1 - (1 - share) ** batch - share))

    def _step(self, streams: Sequence[Request]) -> float:
        began = time.perf_counter()
        drawn = self.runner.run([Slice(stream, stream.computed_len, 1) for stream in streams])
        taken = time.perf_counter() - began
        for stream, found in zip(streams, drawn, strict=True):
            stream.token_ids.append(found.token_id)  # type: ignore[union-attr]
            stream.computed_len += 1
        return taken

    def prefill(self, tokens: int) -> tuple[float, float]:
        """Return the seconds of a step that computes a prompt, and its lower bound."""
        request = self.request("p", tokens, 0, 0, 0, temperature=0.0)
        runs = max(2, self.sizes.runs // 5)
        took = median_seconds(lambda: self.runner.run([Slice(request, 0, tokens)]), self.device, runs)
        return took, tokens * self.needs.prompt_work(tokens) / self.limits.peak


def prompt_of(name: str, tokens: int, vocab_size: int) -> tuple[int, ...]:
    """Return random tokens, different for each name: equal streams would choose equal experts."""
    numbers = np.random.default_rng(crc32(name.encode()))
    return tuple(numbers.integers(0, vocab_size, tokens).tolist())


def measure(bench: Bench, rows: Rows, name: str) -> None:
    limit = bench.limits
    rows.put("device copy, matrix product", f"{limit.bandwidth / 1e9:.0f} GB/s, {limit.peak / 1e12:.1f} TFLOP/s")
    for batch, context in bench.sizes.decodes:
        for words, sampling in SAMPLINGS.items():
            took, floor = bench.decode(batch, context, **sampling)
            what = f"decode step, batch {batch} at {context}, {words}{name}"
            rows.put(what, f"{took * 1e3:.2f} ms", floor / took, "its floor")
            print(f"{what:45} {took * 1e3:9.2f} ms {floor / took:8.0%} of its floor", flush=True)
    for tokens in bench.sizes.prompts:
        took, floor = bench.prefill(tokens)
        what = f"prefill of {tokens}{name}"
        rows.put(what, f"{took * 1e3:.1f} ms", floor / took, "the matrix peak")
        print(f"{what:45} {took * 1e3:9.1f} ms {floor / took:8.0%} of the matrix peak", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="whole steps of a model of random weights")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rows", type=Path)
    options = parser.parse_args(arguments)
    if not options.tiny and not torch.cuda.is_available():
        sys.exit("gpu_steps needs a CUDA device, but PyTorch finds none; nothing was measured.")
    device = torch.device("cpu" if options.tiny else "cuda")
    with tempfile.TemporaryDirectory() as folder:
        for number, (quantization, full, small, name) in enumerate(MODELS):
            bench = Bench(small if options.tiny else full, device, Path(folder) / str(number), quantization)
            measure(bench, Rows("steps", options.rows), name)
            del bench


if __name__ == "__main__":
    main()
