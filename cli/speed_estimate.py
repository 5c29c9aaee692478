"""Estimates a model's tokens per second on this machine from a short measurement of its limits (`kvferry doctor`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.cli.formats import kv_dtype, step_bytes, weight_bytes
from kvferry.cli.resource_plan import GIB, GPU_SHARE, WorkerPlan
from kvferry.model_files.memory_needs import ModelNeeds
from kvferry.protocol.settings import CPU_POOL_GIB, ServeSettings

if TYPE_CHECKING:
    import torch

READ_BYTES = 256 << 20
ROUNDS = 400_000
"""Rounds of the compiled multiply kernel in one timed run."""
SIDE = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the square matrices whose product is timed if the compiled kernels do not run."""
PROMPT = 2048
"""Length of the prompt for which the speed is estimated, in tokens."""
MEASURE_S = 1.0
"""Duration of the measurement of each limit, in seconds."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured limits of a device: bytes read and arithmetic operations per second."""

    read: float
    multiply: float


@dataclass(frozen=True, slots=True)
class Expected:
    """Estimated speed and memory of one worker; sizes in bytes.

    tokens         tokens per second of one stream with a short context
    prompt_tokens  tokens per second of a prompt of PROMPT tokens
    pool_tokens    tokens that its KV pool holds
    """

    weights: float
    kv_per_token: int
    pool: float
    pool_tokens: int
    tokens: float
    prompt_tokens: float

    def describe(self, limits: Limits) -> str:
        """Return the estimate as text."""
        prompts = f"{_round(self.prompt_tokens)} prompt tokens/s, by"
        speed = f"up to {_round(self.tokens)} tokens/s for one stream and {prompts} {limits.read / 1e9:.0f} GB/s and"
        kv = (
            f"KV {self.kv_per_token / 1024:.1f} KiB a token, so {self.pool / GIB:.1f} GiB of pool hold "
            f"{_round(self.pool_tokens)}"
        )
        if not self.kv_per_token:
            speed, kv = f"up to {prompts}", "an encoder, without KV"
        return (
            f"{speed} {_round(limits.multiply / 1e9)} GFLOP/s measured here; weights {self.weights / GIB:.2f} GiB; {kv}"
        )


def expected(settings: ServeSettings, needs: ModelNeeds, plan: WorkerPlan, gpu_bytes: int, limits: Limits) -> Expected:
    """Estimate the speed of one worker with this plan; gpu_bytes: memory of its GPU."""
    weights, kv = weight_bytes(settings, needs, plan.device), needs.kv_bytes(kv_dtype(settings))
    own = GPU_SHARE * (gpu_bytes - weights) if plan.device.startswith("cuda") else CPU_POOL_GIB * GIB
    pool = plan.kv_cache_gib * GIB or own
    if settings.kv_blocks:
        pool = settings.kv_blocks * settings.block_size * kv
    return Expected(
        weights=weights,
        kv_per_token=kv,
        pool=pool,
        pool_tokens=int(pool // kv) if kv else 0,
        tokens=limits.read / step_bytes(settings, needs, plan.device),
        prompt_tokens=limits.multiply / needs.prompt_work(PROMPT),
    )


def measure(device: str, threads: int) -> Limits:
    """Measure reads and multiplications on all threads, in bfloat16; in float32 on a CPU without compiled kernels."""
    import torch

    if device.startswith("cuda"):
        return _by_torch(torch.device(device), torch.bfloat16, torch.cuda.synchronize)
    from kvferry.kernels.cpu.extension import extension, instruction_set

    torch.set_num_threads(threads)
    native, best = extension(), instruction_set()
    if native is None or best is None:
        return _by_torch(torch.device("cpu"), torch.float32, lambda: None)
    kernels, data = native.Kernels(best, threads), torch.ones(READ_BYTES, dtype=torch.uint8)
    work = kernels.multiply(1) * ROUNDS
    return Limits(READ_BYTES / _fastest(lambda: kernels.read(data)), work / _fastest(lambda: kernels.multiply(ROUNDS)))


def _by_torch(device: torch.device, dtype: torch.dtype, wait: Callable[[], None]) -> Limits:
    """Measure the limits with torch; a copy counts twice its bytes, since it reads and writes them."""
    import torch

    def timed(call: Callable[[], object]) -> float:
        def synchronized() -> None:
            call()
            wait()

        return _fastest(synchronized)

    size, side = READ_BYTES * (8 if device.type == "cuda" else 1), SIDE[device.type]
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    with torch.inference_mode():
        read = 2 * size / timed(lambda: target.copy_(source))
        return Limits(read, 2 * side**3 / timed(lambda: matrix @ matrix))


def _fastest(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest run within MEASURE_S, after a warm-up run.

    The fastest is the best estimate: other load on the machine only makes runs slower."""
    call()
    fastest, end = math.inf, time.perf_counter() + MEASURE_S
    while (began := time.perf_counter()) < end:
        call()
        fastest = min(fastest, time.perf_counter() - began)
    return fastest


def _round(number: float) -> str:
    """Format an estimate with two significant digits."""
    return f"{float(f'{number:.2g}'):,.0f}" if number >= 10 else f"{number:.1f}"
