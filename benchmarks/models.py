"""Model files of a benchmark run: a GGUF file per weight format, and a safetensors directory for other engines.

Files that are not given are made from the demo model by llama.cpp's own `llama-quantize`, or by transformers, and kept.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.recurrent_models import random_model
from kvferry.model_files.gguf import read_gguf
from kvferry.model_files.source import DEMO_MODEL, DEMO_NAME, resolve

CACHE = Path.home() / ".cache" / "kvferry" / "benchmarks"
FORMATS = ("bf16", "q8_0", "q4_0", "q4_1", "q4_k_m", "q6_k")
SAFETENSORS, SOURCE = "safetensors", "source"
"""Keys of `find_models`' result: the directory, and the file closest to the original, which kvferry runs in bf16."""


def on_path(name: str) -> Path | None:
    found = shutil.which(name)
    return Path(found) if found else None


def gguf_format(path: Path) -> str:
    """Return a format such as `q4_k_m` from the file's header. Raises ConfigError."""
    import gguf

    kind = gguf.LlamaFileType(read_gguf(path).metadata.get("general.file_type", gguf.LlamaFileType.GUESSED))
    return str(kind.name).removeprefix("MOSTLY_").removeprefix("ALL_").lower()


def find_models(
    given: Iterable[Path], quantize: Path | None, safetensors: Path | None, *, vllm: bool, shapes: Iterable[str] = ()
) -> dict[str, Path]:
    """Return files by format or shape, and the directory if vLLM needs one. Raises ConfigError.

    Uses only the given files and random models of `shapes`; without either, the demo model and its conversions."""
    models = {gguf_format(path): path for path in given} | {name: random_model(name, CACHE) for name in shapes}
    if not models:
        demo = resolve(DEMO_MODEL, weights=False).path
        models = {gguf_format(demo): demo}
        models |= {name: path for name in FORMATS if name not in models and (path := _made(demo, name, quantize))}
        safetensors = safetensors or (saved_directory(demo) if vllm else None)
    models[SOURCE] = models.get("bf16") or next(iter(models.values()))
    if safetensors:
        models[SAFETENSORS] = safetensors
    return models


def _made(demo: Path, name: str, quantize: Path | None) -> Path | None:
    """Convert the demo model to another format; return None without llama-quantize."""
    target = CACHE / f"{DEMO_NAME}.{name.upper()}.gguf"
    if target.exists() or quantize is None:
        return target if target.exists() else None
    CACHE.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".unfinished")
    command = [str(quantize), "--allow-requantize", str(demo), str(unfinished), name.upper()]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"llama-quantize could not make {name}: {done.stderr[-300:]}", file=sys.stderr)
        return None
    return unfinished.rename(target)


def saved_directory(demo: Path) -> Path | None:
    """Save the demo model with transformers in bfloat16; return None if accelerate is not installed."""
    target = CACHE / DEMO_NAME
    if target.exists():
        return target
    if importlib.util.find_spec("accelerate") is None:
        return None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(demo.parent), "gguf_file": demo.name}
    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=config)
    unfinished = target.with_suffix(".unfinished")
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(**source).save_pretrained(unfinished)
    return unfinished.rename(target)
