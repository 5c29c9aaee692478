"""Compares gpt-oss with transformers: prompt and output tokens per second of a small model with random weights.

    python -m benchmarks.mixture [--streams 1 8 --prompt 128 --output 32 --rounds 3 --layers 2]

The model has 32 experts in MXFP4, four per token, as in gpt-oss-20b, at half its width and a twelfth of its layers.
Ours is the whole engine on these codes; transformers has them dequantised to bfloat16 and generates greedily with its
cache. Each stream has a prompt of its own. Both run in turn; the table has medians of the rounds after a warm-up."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.table import markdown
from kvferry.cli.bootstrap import set_threads
from kvferry.engine.engine import Engine
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.settings import WorkerSettings
from kvferry.protocol.work import Generate
from kvferry.runtime.limits import available_cores
from kvferry.worker.engine_factory import assemble

WIDTH, VOCABULARY, RUN = 1440, 8192, 32
STACKS = ("gate_up_proj", "down_proj")
Taken = tuple[float, float]
"""Seconds until all streams have their first token, and from there to the last."""


def write(folder: Path, layers: int) -> Path:
    """Write the model in MXFP4; return its path."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
    )  # fmt: skip
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in GptOssForCausalLM(config).state_dict().items()}
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        if name.endswith(STACKS):
            experts, inputs, outputs = shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // RUN, 16), dtype=torch.uint8)
            tensors[f"{name}_blocks"] = blocks
            tensors[f"{name}_scales"] = torch.randint(119, 122, blocks.shape[:-1], dtype=torch.uint8)
        else:
            plain = torch.ones(shape) if "norm" in name else torch.randn(shape) * 0.02
            tensors[name] = plain.bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    model_config = config.to_dict() | {"architectures": ["GptOssForCausalLM"], "quantization_config": quantised}
    (folder / "config.json").write_text(json.dumps(model_config, default=str))
    return folder


class Ours:
    def __init__(self, path: Path, threads: int) -> None:
        settings = WorkerSettings(model=str(path), dtype="bfloat16", threads=threads, kv_cache_gib=0.5)
        self._engine: Engine = assemble(settings).engine
        self._runs = 0

    def __call__(self, prompts: Sequence[Sequence[int]], output: int) -> Taken:
        """Run prompts that are not cached."""
        engine, self._runs = self._engine, self._runs + 1
        for number, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
            engine.add(Job(f"{self._runs}-{number}", 0, tuple(prompt), len(prompt), Generate(params), "bench"))
        began = time.perf_counter()
        while any(not request.output_here for request in engine.request_table):
            engine.step()
        first = time.perf_counter()
        while engine.has_work():
            engine.step()
        return first - began, time.perf_counter() - first


class Theirs:
    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM, Mxfp4Config

        self._model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
        ).eval()

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[Sequence[int]], output: int) -> Taken:
        began = time.perf_counter()
        found = self._model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        first = time.perf_counter()
        for _ in range(output - 1):
            token = found.logits[:, -1].argmax(-1, keepdim=True)
            found = self._model(token, past_key_values=found.past_key_values, use_cache=True)
        return first - began, time.perf_counter() - first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    for name, default in (("--prompt", 128), ("--output", 32), ("--rounds", 3), ("--layers", 2)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--threads", type=int, default=available_cores())
    options = parser.parse_args()
    set_threads(options.threads)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), options.layers)
        ways: list[Callable[[Sequence[Sequence[int]], int], Taken]] = [Ours(path, options.threads), Theirs(path)]
    rows = []
    for streams in options.streams:
        taken: list[list[Taken]] = [[], []]
        for _ in range(options.rounds + 1):
            prompts = torch.randint(0, VOCABULARY, (streams, options.prompt)).tolist()
            for way, found in zip(ways, taken, strict=True):
                found.append(way(prompts, options.output))
        prompt, output = streams * options.prompt, streams * (options.output - 1)
        firsts, decodes = ([statistics.median(each[i] for each in found[1:]) for found in taken] for i in (0, 1))
        for what, tokens, seconds in (("prompts", prompt, firsts), ("decode", output, decodes)):
            ours, theirs = (tokens / each for each in seconds)
            rows.append((f"{what}, {streams} streams", f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.1f} x"))
            print(*rows[-1], flush=True)
    print(markdown(("tokens/s", "kvferry", "transformers", "ratio"), rows))


if __name__ == "__main__":
    main()
