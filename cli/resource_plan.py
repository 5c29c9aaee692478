"""Plans devices, cores and memory of the workers of a local cluster, and checks that they fit.

The supervisor plans before any worker starts, so that no worker has to guess the needs of other workers."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from kvferry.cli.formats import kv_dtype, weight_bytes
from kvferry.model_files.memory_needs import ModelNeeds, model_needs
from kvferry.model_files.source import ModelSource, resolve
from kvferry.model_files.weight_counts import WeightCount
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import CPU_POOL_GIB, ServeSettings
from kvferry.runtime.limits import available_memory

log = logging.getLogger(__name__)

GIB = 1024**3
GPU_SHARE = 0.8
"""Share of a worker's GPU memory after weights that its pool takes; the rest is for activations and workspaces."""
MARGIN = 0.95
"""Share of the available memory that the plan may use."""
UNKNOWN = ModelNeeds(
    WeightCount(), WeightCount(), WeightCount(), layers=0, kv_heads=0, head_dim=0, query_size=0, max_model_len=0
)
"""Needs of a model whose config has unknown keys: its workers check their memory themselves."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """Device and KV pool of one worker.

    device: with several ranks, the first of its GPUs. kv_cache_gib: size of its pool; 0: the worker, alone on its
    devices, sizes the pool itself."""

    device: str
    kv_cache_gib: float = 0.0


def needs_of(source: ModelSource) -> ModelNeeds:
    """Return the model's memory needs; UNKNOWN if its files do not show them."""
    try:
        return model_needs(source)
    except ConfigError as error:
        log.debug("%s", error.message)
        return UNKNOWN


def plan_workers(settings: ServeSettings, needs: Sequence[ModelNeeds], found: Sequence[int]) -> list[WorkerPlan]:
    """Plan all workers: for each model in `needs` its workers of each role, as in NODE_ROLES.

    An encode worker loads no decoder, and is planned as if it did. found: bytes of each GPU. Workers take the GPUs in
    turn, one GPU per rank. Workers on the same GPUs get equal pools from the memory that remains beside all their
    weights. Raises ConfigError if weights and pools do not fit."""
    models = [each for each in needs for _ in range(settings.prefill + settings.decode + settings.encode)]
    devices = [_device(settings, index, len(found)) for index in range(len(models))]
    sharing = {
        device: [model for model, other in zip(models, devices, strict=True) if other == device] for device in devices
    }
    draft_gib = _draft_gib(settings, "cuda") if any(device.startswith("cuda") for device in devices) else 0.0
    return [
        _plan_gpu_worker(settings, model, device, sharing[device], found, draft_gib)
        if device.startswith("cuda")
        else WorkerPlan(device, settings.kv_cache_gib)
        for model, device in zip(models, devices, strict=True)
    ]


def require_memory(settings: ServeSettings, needs: Sequence[ModelNeeds], plans: Sequence[WorkerPlan]) -> str:
    """Check that the weights and pools of all workers on the CPU fit the available memory; return a summary.

    Workers that share weights count them once. A worker could not check this itself: it sees only the memory that is
    free at its start. `seats` is the result of `attach_slot` for `needs`. Raises ConfigError."""
    counts = on_cpu_by_model(plans, len(needs))
    copies = [
        min(count, 1) if shares_weights(settings, model) else count for count, model in zip(counts, needs, strict=True)
    ]
    workers, available = sum(counts), available_memory() / GIB
    free = f"{available:.1f} GiB are available"
    if not workers:
        return f"{free}; the KV pools are on {', '.join(dict.fromkeys(plan.device for plan in plans))}"
    weights = [weight_bytes(settings, model, "cpu") / GIB for model in needs]
    pools = [_pool_gib(settings, model) or CPU_POOL_GIB * model.cached for model in needs]
    requested = ", ".join(
        f"{_times(copy)} {weight:.2f} GiB of weights and {_times(count)} {pool:.4g} GiB of KV pool"
        for copy, count, weight, pool in zip(copies, counts, weights, pools, strict=True)
    )
    drafts = _draft_gib(settings, "cpu") * sum(min(count, _draft_workers(settings)) for count in counts)
    requested += f", {drafts:.2f} GiB for the draft model" if drafts else ""
    all_weights = drafts + sum(copy * weight for copy, weight in zip(copies, weights, strict=True))
    if all_weights + sum(count * pool for count, pool in zip(counts, pools, strict=True)) > available:
        room = (available - all_weights) / workers
        flag = "kv_blocks" if settings.kv_blocks else "kv_cache_gib"
        lower = f"lower --{flag.replace('_', '-')}" + (f" to less than {room:.1f}" if flag == "kv_cache_gib" else "")
        remedy = f"{lower}, or start fewer workers" if room >= 0.1 else "start fewer workers, or take a smaller model"
        raise ConfigError(f"{requested} do not fit: {free}; {remedy}", param=flag)
    return f"{requested}: {free}"


def on_cpu_by_model(plans: Sequence[WorkerPlan], models: int) -> list[int]:
    """Return the number of workers on the CPU for each model."""
    each = len(plans) // models
    return [sum(plan.device == "cpu" for plan in plans[each * i : each * (i + 1)]) for i in range(models)]


def shares_weights(settings: ServeSettings, needs: ModelNeeds) -> bool:
    """Return whether a model's workers on the CPU share one copy of its weights.

    Decoders on compiled kernels share them, unless experts run as modules of transformers, which each worker loads
    itself."""
    packed = settings.dtype in ("auto", "bfloat16") and settings.kernels in ("auto", "cpu") and _kernels_are_compiled()
    ours = needs.own and settings.model_impl != "transformers"
    sharable = (ours or (needs.layers > 0 and needs.cached and not needs.mixed)) and settings.tensor_parallel_size == 1
    return settings.share_weights and hasattr(os, "memfd_create") and packed and sharable


def _device(settings: ServeSettings, index: int, count: int) -> str:
    """Return the device of worker `index`: the CPU, or the first of its GPUs, one per rank. Raises ConfigError."""
    wanted, ranks = settings.device, settings.tensor_parallel_size
    if wanted == "auto" and not count:
        return "cpu"
    if wanted in ("auto", "cuda") and count >= ranks:
        return f"cuda:{index % (count // ranks) * ranks}"
    number = re.fullmatch(r"auto|cuda(?::(\d+))?", wanted)
    if number is not None and int(number[1] or 0) + ranks > count:
        present = f"there are {count}" if count > 1 else "there is one" if count else "there is none"
        problem = "no such GPU" if ranks == 1 else f"its {ranks} ranks need one GPU each"
        raise ConfigError(f"--device {wanted}: {problem}, {present}; use another, or --device cpu", param="device")
    return wanted


def _plan_gpu_worker(
    settings: ServeSettings,
    needs: ModelNeeds,
    device: str,
    sharing: Sequence[ModelNeeds],
    found: Sequence[int],
    draft_gib: float,
) -> WorkerPlan:
    """Plan a worker on GPUs that it shares with workers of the models `sharing`, which include its own.

    Each worker reserves memory for the draft model, although only decoding workers load it. Raises ConfigError."""
    first, ranks = int(device.partition(":")[2]), settings.tensor_parallel_size
    total = min(found[first : first + ranks]) / GIB
    weights = [weight_bytes(settings, model, device) / ranks / GIB for model in sharing]
    left = (total - sum(weights)) / len(sharing) - draft_gib
    pools = [_pool_gib(settings, model) / _pool_parts(settings, model) for model in sharing]
    given = _pool_gib(settings, needs) / _pool_parts(settings, needs)
    if (given and sum(pools) > MARGIN * left * len(sharing)) or left <= 0:
        pool = f" and {given:.4g} GiB of KV pool" if given else ""
        requested = ", ".join(
            f"{f'{count} times ' if count > 1 else ''}{weight:.2f} GiB of weights{pool}"
            for weight, count in Counter(weights).items()
        )
        flag = "kv_blocks" if settings.kv_blocks else "kv_cache_gib"
        lower = f"lower --{flag.replace('_', '-')} or " if given and left > 0 else ""
        raise ConfigError(
            f"{requested} do not fit into the {total:.1f} GiB of {device}; {lower}start fewer workers per GPU",
            param=flag,
        )
    if given or len(sharing) == 1:
        return WorkerPlan(device, settings.kv_cache_gib)
    return WorkerPlan(device, round(GPU_SHARE * left * _pool_parts(settings, needs), 3))


def _pool_parts(settings: ServeSettings, needs: ModelNeeds) -> int:
    """Return the number of parts into which ranks divide a worker's pool; with latent KV each rank holds all of it."""
    return settings.tensor_parallel_size if needs.planes > 1 else 1


def _draft_workers(settings: ServeSettings) -> int:
    """Return the number of a model's workers that load the draft model: those that decode, or may change to decode."""
    return settings.decode + (settings.prefill if settings.elastic else 0)


def _draft_gib(settings: ServeSettings, device: str) -> float:
    """Return the GiB that the draft model takes on a device: its weights and as many blocks as --kv-blocks asks for.

    If the pool is given in GiB, the draft model's blocks are part of it."""
    if not settings.speculative_model:
        return 0.0
    needs = needs_of(resolve(settings.speculative_model, weights=False))
    blocks = _pool_gib(settings, needs) if settings.kv_blocks else 0.0
    return weight_bytes(settings, needs, device) / GIB + blocks


def _pool_gib(settings: ServeSettings, needs: ModelNeeds) -> float:
    """Return the requested pool size in GiB; 0 if none was requested or the model has no KV cache."""
    if not needs.cached:
        return 0.0
    if not settings.kv_blocks:
        return settings.kv_cache_gib
    return settings.kv_blocks * needs.layout(kv_dtype(settings), settings.block_size).block_bytes / GIB


def _times(count: int) -> str:
    return f"{count} {'times' if count > 1 else 'time'}"


def _kernels_are_compiled() -> bool:
    """Return whether the compiled CPU kernels are installed, without importing them, since that imports torch."""
    spec = importlib.util.find_spec("kvferry.kernels")
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    return any(any(Path(folder, "cpu").glob(f"_native{suffix}")) for folder in folders for suffix in EXTENSION_SUFFIXES)
