"""Table of the engines and models that `benchmarks.serving` measures, and the command that starts each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.models import FORMATS, SAFETENSORS, SOURCE
from benchmarks.recurrent_shapes import SHAPES

SERVING = ("start", "single", "prefill512", "prefill2048", "streams8", "streams32", "prefix8", "interference", "memory")
STREAMS = ("start", "single", "prefill512", "streams8", "memory")
ONE_STREAM = ("start", "single", "prefill512", "prefill2048", "memory")
SLOTS, SLOT_TOKENS = 8, 2304
"""llama-server's concurrent requests and the context of each: the longest prompt of any workload and its output."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Engine with a model. Subjects of one group run at once and are compared.

    model       key of `benchmarks.models.find_models`
    workloads   names of the workloads that it runs
    """

    name: str
    engine: str
    group: str
    model: str
    workloads: tuple[str, ...] = ONE_STREAM
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Installed:
    """Locations of the peers (None: not installed) and settings that all engines share."""

    llama_server: Path | None
    vllm_python: Path | None
    threads: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Command line of a server, and the path that answers 200 once it is ready; `key`: the clients' API key."""

    argv: tuple[str, ...]
    ready: str
    env: Mapping[str, str] = field(default_factory=dict)
    key: str = ""


TOGETHER, APART = ("--prefill", "0", "--decode", "1"), ("--prefill", "1", "--decode", "1")
BF16, INT8 = ("--quantization", "none"), ("--quantization", "int8")

SPLIT = ("start", "single", "again", "interference", "ships", "memory")


def _pair(name: str, workloads: tuple[str, ...]) -> tuple[Subject, Subject]:
    """Return the subjects of one GGUF file that kvferry and llama.cpp both read."""
    ours = Subject(f"kvferry:{name}", "kvferry", name, name, workloads, TOGETHER)
    return ours, Subject(f"llama.cpp:{name}", "llama.cpp", name, name, workloads)


SUBJECTS = (
    Subject("kvferry:bf16", "kvferry", "bf16", SOURCE, (*SERVING, "again"), (*BF16, *TOGETHER)),
    Subject("kvferry:bf16:1p1d", "kvferry", "bf16", SOURCE, SPLIT, (*BF16, *APART)),
    Subject("kvferry:int8", "kvferry", "bf16", SOURCE, SERVING, (*INT8, *TOGETHER)),
    Subject("llama.cpp:bf16", "llama.cpp", "bf16", "bf16", SERVING),
    Subject("vllm:bf16", "vllm", "bf16", SAFETENSORS, SERVING),
    *(subject for name in FORMATS if name != "bf16" for subject in _pair(name, ONE_STREAM)),
    *(subject for name in SHAPES for subject in _pair(name, STREAMS)),
)


def kvferry(subject: Subject, model: Path, installed: Installed, port: int) -> Launch:
    serve = (sys.executable, "-m", "kvferry.cli.main", "serve", "--port", str(port), "--log-level", "warning")
    options = ("--threads", str(installed.threads), "--model", str(model), "--dtype", "bfloat16", *subject.args)
    return Launch((*serve, *options), "/ready?nodes=1")


def llama_cpp(subject: Subject, model: Path, installed: Installed, port: int) -> Launch:
    """Return the command without the prompt cache in host memory, which would answer repeated prompts."""
    threads, context = str(installed.threads), str(SLOTS * SLOT_TOKENS)
    serve = (str(installed.llama_server), "--host", "127.0.0.1", "--port", str(port), "-m", str(model))
    return Launch((*serve, "-t", threads, "--parallel", str(SLOTS), "-c", context, "--cache-ram", "0"), "/health")


def vllm(subject: Subject, model: Path, installed: Installed, port: int) -> Launch:
    """Return the command with the allocator and OpenMP library that vLLM's documentation recommends, if any."""
    assert installed.vllm_python is not None
    libraries = [
        *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"),
        installed.vllm_python.parents[1] / "lib/libiomp5.so",
    ]
    env = {
        "LD_PRELOAD": ":".join(str(path) for path in libraries if path.exists()),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[: installed.threads])),
        "OMP_NUM_THREADS": str(installed.threads),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    serve = (str(installed.vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1")
    return Launch((*serve, "--port", str(port), "--model", str(model), "--dtype", "bfloat16"), "/health", env)


ENGINES: dict[str, Callable[[Subject, Path, Installed, int], Launch]] = {
    "kvferry": kvferry,
    "llama.cpp": llama_cpp,
    "vllm": vllm,
}


def missing(subject: Subject, models: Mapping[str, Path], installed: Installed) -> str | None:
    """Return why a subject cannot be measured here, or None."""
    if subject.model not in models:
        return f"no {subject.model} model"
    if subject.engine == "llama.cpp" and installed.llama_server is None:
        return "no llama-server on PATH; give --llama-server"
    if subject.engine == "vllm" and installed.vllm_python is None:
        return "give --vllm-python, an interpreter that has vLLM"
    return None
