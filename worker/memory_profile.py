"""Profile of a GPU's memory: measures the largest step and computes what remains for the KV pool.

The step runs on a pool of one block, before the real pool exists, as vLLM's profile run does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvferry.engine.fault_isolation import DeviceLost
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker.device_memory import DeviceMemory, memory_of
from kvferry.worker.largest_step import LargestStep
from kvferry.worker.pool_memory import GIB, MEMORY_MARGIN, available_bytes
from kvferry.worker.ranks import Ranks

log = logging.getLogger("kvferry.worker")

REMEDY = "lower --max-num-batched-tokens or --max-num-seqs"


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Memory of a device after its weights were loaded; sizes in bytes.

    free_at_start: before loading. activations: peak of the largest step. graphs: estimate of captured steps. share:
    --gpu-memory-utilization."""

    total: int
    free_at_start: int
    free: int
    activations: int
    graphs: int
    share: float

    @property
    def room(self) -> int:
        """Return the bytes for the KV pool and recurrent states.

        Other processes' memory does not count towards the share, but what they use is not there to take."""
        used = self.free_at_start - self.free
        return int(min(self.share * self.total - used, MEMORY_MARGIN * self.free)) - self.activations - self.graphs

    def describe(self) -> str:
        """Return the figures as text for the operator."""
        return (
            f"{self.total / GIB:.2f} GiB, free {self.free_at_start / GIB:.2f} at start and {self.free / GIB:.2f} with "
            f"the weights; the largest step takes {self.activations / GIB:.2f} GiB, captured graphs about "
            f"{self.graphs / GIB:.2f}; {max(self.room, 0) / GIB:.2f} GiB remain for the KV pool with "
            f"--gpu-memory-utilization {self.share:g}"
        )


class MemoryProfiler:
    """Profiler of one device: create it before the weights are loaded, and call `room` after."""

    def __init__(self, memory: DeviceMemory, share: float) -> None:
        self._memory, self._share, self._free_at_start = memory, share, memory.free()

    def room(self, run: Callable[[], object], graphs: int = 0) -> int:
        """Run the largest steps, log the figures and return the bytes for the pool and recurrent states.

        graphs: bytes to leave for captured graphs. Raises ConfigError if there is no room, or none for the step."""
        try:
            activations = self._memory.peak_of(run)
        except (torch.OutOfMemoryError, DeviceLost) as error:
            if not isinstance(error, torch.OutOfMemoryError) and not isinstance(
                error.__cause__, torch.OutOfMemoryError
            ):
                raise
            raise ConfigError(
                f"out of memory in the largest step, before the KV pool was made; {REMEDY}, or take a smaller model",
                param="max_num_batched_tokens",
            ) from error
        free, total = self._memory.free(), self._memory.total
        profile = MemoryProfile(total, self._free_at_start, free, activations, graphs, self._share)
        log.info("GPU memory: %s", profile.describe())
        if profile.room <= 0:
            raise ConfigError(
                f"no memory is left for the KV pool: {profile.describe()}; raise --gpu-memory-utilization, {REMEDY}, "
                "or use a GPU that no other process uses",
                param="gpu_memory_utilization",
            )
        return profile.room


def start_profiler(settings: WorkerSettings, device: torch.device) -> MemoryProfiler | None:
    """Return the profiler of a GPU; None on a CPU, and where --kv-cache-gib or --kv-blocks give the pool's size."""
    memory = None if settings.kv_blocks or settings.kv_cache_gib else memory_of(device)
    return None if memory is None else MemoryProfiler(memory, settings.gpu_memory_utilization)


def available_to_pool(
    profiler: MemoryProfiler | None, ranks: Ranks | None, steps: Sequence[LargestStep], *, graphs: bool, beside: int
) -> float:
    """Return the bytes that the KV pool and recurrent states may take, all of them or, without a profiler, a share.

    steps: of the model, then of the draft model if there is one. graphs: steps are captured. beside: bytes of the draft
    model's part of a block. Raises ConfigError."""
    model, layout = steps[0].model, steps[0].layout

    def run() -> None:
        for step in steps:
            step.run()

    if profiler is None:
        return available_bytes(model.device) if ranks is None else ranks.available(layout, beside)
    if ranks is not None:
        return ranks.profiled(profiler.room, run, layout, beside)
    return profiler.room(run, sum(step.graph_bytes() for step in steps) if graphs else 0)
