"""Result of building an engine: the engine and what its node announces of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvferry.engine.engine import Engine
from kvferry.engine.models.base import Computing, ModelInfo
from kvferry.kernels.cpu import CpuOps
from kvferry.kernels.ops import Ops
from kvferry.protocol.adapters import AdapterName
from kvferry.protocol.layout import KVLayout
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker.device_rank_pool import DeviceRankPool
from kvferry.worker.pool_memory import GIB
from kvferry.worker.ranks import Ranks


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A ready engine and what the node announces about it. ranks: the others, where several compute the model."""

    engine: Engine
    kv: torch.Tensor
    info: ModelInfo
    layout: KVLayout
    fingerprint: str
    max_model_len: int
    adapters: tuple[AdapterName, ...] = ()
    ranks: Ranks | None = None

    @property
    def apart(self) -> DeviceRankPool | None:
        """The pool as link and tiers reach it, where kv is the first rank's alone."""
        return self.ranks.pool if self.ranks is not None else None


def describe(parts: EngineParts) -> dict[str, str]:
    """Describe the node's devices and pool size for a person.

    Ranks on GPUs have those from the first on."""
    ops, pool = parts.engine.runner.model.ops, parts.engine.pool
    threads = ops.threads if isinstance(ops, CpuOps) else torch.get_num_threads()
    on_cpu, ranks = parts.kv.device.type == "cpu", parts.ranks.part.group.ranks if parts.ranks is not None else 1
    times = f"{ranks} x " if ranks > 1 else ""
    gib, tokens = pool.num_blocks * parts.layout.block_bytes / GIB, pool.num_blocks * parts.layout.block_size
    return {
        "model": parts.info.name,
        "device": f"cpu, threads: {times}{threads}" if on_cpu else f"{times}{parts.kv.device}",
        "kv_pool": "none" if parts.engine.config.limits.whole else f"{gib:.2f} GiB, {tokens} tokens",
    }


def arithmetic(settings: WorkerSettings, model: Computing, ops: Ops) -> str:
    """Return the arithmetic part of the fingerprint.

    It names the model's number format, the instruction set where equal bits are promised, and the number of ranks."""
    words = [str(model.dtype).removeprefix("torch.")]
    if settings.batch_invariant and isinstance(ops, CpuOps):
        words += ["batch-invariant", ops.instruction_set]
        if settings.tensor_parallel_size > 1:
            words.append(f"{settings.tensor_parallel_size} ranks")
        if settings.enable_expert_parallel:
            words.append("of experts")
    return " ".join(words)
