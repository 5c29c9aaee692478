"""`kvferry doctor`: checks whether this machine can run a cluster, with a remedy for each failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO

from kvferry.cli import preflight
from kvferry.cli.check_result import Result
from kvferry.cli.cpu_instructions import compiled_for, instruction_set
from kvferry.cli.gpu_detection import gpus, loaded, unused_gpu
from kvferry.cli.gpu_link import block_lane
from kvferry.cli.health import answers_health
from kvferry.cli.resource_plan import UNKNOWN, needs_of, plan_workers, require_memory
from kvferry.model_files.memory_needs import ModelNeeds
from kvferry.model_files.source import ModelSource, resolve
from kvferry.protocol.errors import ConfigError, reason
from kvferry.protocol.frames import IS_COMPILED
from kvferry.protocol.settings import ServeSettings
from kvferry.runtime.address import host_port
from kvferry.runtime.limits import available_cores

PASSWORD = "give it a user and a password as in docs/redis.md: a client that writes to it can stop all requests"
UNREAD = "nothing, or name the syntax with --tool-call-parser if it is a known one"
Check = Callable[[ServeSettings], Result]


def redis(settings: ServeSettings) -> Result:
    """Check that the Redis of --redis-url answers and asks for a password, or that the embedded Valkey is installed."""
    if not settings.redis_url:
        return Result("ok", "redis", f"embedded Valkey, {preflight.valkey_binary()}")
    found, writers = preflight.check_redis(settings)
    if writers:
        return Result("warn", "redis", f"{found} takes commands without a password from {writers}", PASSWORD)
    return Result("ok", "redis", found)


def packages(settings: ServeSettings) -> Result:
    """Check that a worker's Python packages are installed."""
    preflight.worker_packages()
    return Result("ok", "packages", "torch, transformers, safetensors and ucxx are installed")


def transfer(settings: ServeSettings) -> Result:
    """Check that UCX moves a few blocks between two endpoints in this process."""
    from kvferry.kv_transfer.selftest import self_test

    return Result("ok", "ucx", self_test(settings.ucx_transports, settings.ucx_net_devices).describe())


def device_transfer(settings: ServeSettings) -> Result:
    """Check that UCX moves a block of a GPU to another process, and report over which lane."""
    found, remedy = block_lane(settings.device, settings.ucx_transports, settings.ucx_net_devices)
    return Result("warn" if remedy else "ok", "ucx-gpu", found, remedy)


def instructions(settings: ServeSettings) -> Result:
    """Report the CPU instruction set that the kernels will use."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return Result("warn", "instructions", "unknown on this system", "nothing; kernels are chosen at run time")
    found, remedy = instruction_set(text, compiled_for(), coded=_all_gguf(settings))
    return Result("warn" if remedy else "ok", "instructions", found, remedy)


def tokens(settings: ServeSettings) -> Result:
    """Report whether a router decodes token messages in compiled code."""
    if IS_COMPILED:
        return Result("ok", "tokens", "decoded in compiled code")
    return Result("warn", "tokens", "decoded in Python, which costs more", "install with a C++ compiler")


def threads(settings: ServeSettings) -> Result:
    """Check that a worker's compute threads do not exceed the available cores."""
    cores, ranks = available_cores(), settings.tensor_parallel_size
    found = f"{settings.threads} per {'rank' if ranks > 1 else 'worker'} on {cores} cores"
    if settings.threads * ranks > cores:
        fewer = f"use --threads {max(1, cores // ranks)} or fewer" if ranks <= cores else "use fewer ranks"
        return Result("warn", "threads", found, f"{fewer}: more threads only wait for each other")
    return Result("ok", "threads", found)


def model(settings: ServeSettings) -> Result:
    """Check that each model can run; report its code path, number formats and memory."""
    from kvferry.cli.model_report import model_report

    return Result("ok", "model", "; ".join(model_report(settings, source) for source in _sources(settings)))


def tools(settings: ServeSettings) -> Result:
    """Report in which syntax each model calls tools and reasons."""
    from kvferry.cli.syntax_report import reported

    found, is_read = reported(settings)
    return Result("ok", "tools", found) if is_read else Result("warn", "tools", found, UNREAD)


def memory(settings: ServeSettings) -> Result:
    """Check that the weights and KV pools of all workers fit the memory of their devices."""
    known = _needs(settings)
    needs = [each or UNKNOWN for each in known]
    plans = plan_workers(settings, needs, gpus())
    preflight.ranks(settings, needs)
    found = require_memory(settings, needs, plans)
    if None in known:
        return Result("warn", "memory", f"{found}, before weights of unknown size", "see the line about the model")
    return Result("ok", "memory", found)


def speed(settings: ServeSettings) -> Result:
    """Estimate the speed of each model from this machine's limits, measured now."""
    from kvferry.cli.speed_estimate import expected, measure

    needs, found = _needs(settings), gpus()
    known = [each for each in needs if each is not None]
    if len(known) < len(needs):
        return Result(
            "warn", "speed", "unknown, as the model's shape is", "see the line about the model, or measure it"
        )
    per_model = settings.prefill + settings.decode
    plans = plan_workers(settings, known, found)[per_model - 1 :: per_model]
    limits = {device: measure(device, settings.threads) for device in {plan.device for plan in plans}}
    described = []
    for each, plan in zip(known, plans, strict=True):
        gpu_bytes = found[int(plan.device.partition(":")[2])] if plan.device.startswith("cuda:") else 0
        described.append(expected(settings, each, plan, gpu_bytes, limits[plan.device]).describe(limits[plan.device]))
    return Result("ok", "speed", "; ".join(described))


def port(settings: ServeSettings) -> Result:
    """Check that the router's port is free, or that a router already answers on it."""
    address = host_port(settings.host, settings.port)
    try:
        preflight.free_port(settings.host, settings.port)
    except ConfigError:
        if not answers_health(settings.host, settings.port):
            raise
        return Result("ok", "port", f"{address} answers GET /health: a router runs there")
    return Result("ok", "port", f"{address} is free")


def gpu(settings: ServeSettings) -> Result:
    """Report the GPUs, if any, and the version of CUDA or ROCm."""
    import torch

    if torch.cuda.is_available():
        return Result("ok", "gpu", loaded())
    if settings.device.startswith("cuda"):
        raise ConfigError("no GPU; use --device cpu, or install a driver and a CUDA or ROCm build of torch")
    if build := unused_gpu():
        remedy = f"install a {build} build of torch"
        return Result("warn", "gpu", f"there is a GPU, but this torch is no {build} build", remedy)
    return Result("ok", "gpu", "none; workers compute on the CPU")


def store(settings: ServeSettings) -> Result:
    """Check that the remote block store (--kv-remote-url) can write, find, read and delete an object."""
    if not settings.kv_remote_url:
        return Result("ok", "store", "none: nodes do not share blocks (--kv-remote-url)")
    from kvferry.kv_transfer.tiers.objects import Objects

    objects = Objects(settings.kv_remote_url)
    try:
        took_s = asyncio.run(objects.tried())
    except Exception as error:
        return Result(
            "fail",
            "store",
            f"{objects.url}: {reason(error)}",
            "check the address, the access keys and their permissions",
        )
    return Result("ok", "store", f"{objects.url} writes and reads an object in {1e3 * took_s:.0f} ms")


CHECKS: tuple[tuple[str, Check], ...] = (
    ("packages", packages),
    ("model", model),
    ("tools", tools),
    ("redis", redis),
    ("port", port),
    ("memory", memory),
    ("speed", speed),
    ("threads", threads),
    ("instructions", instructions),
    ("tokens", tokens),
    ("gpu", gpu),
    ("ucx", transfer),
    ("ucx-gpu", device_transfer),
    ("store", store),
)


def all_checks(settings: ServeSettings, checks: Iterable[tuple[str, Check]] = CHECKS) -> Iterator[Result]:
    """Run the checks one after the other.

    A ConfigError is a failure whose text names the remedy; the same text is reported once. Any other exception is a
    failure too, so that one broken check does not hide the other checks."""
    reported: dict[str, str] = {}
    for name, check in checks:
        try:
            yield check(settings)
        except ConfigError as error:
            first = reported.setdefault(error.message, name)
            if first == name:
                yield Result("fail", name, error.message)
            else:
                yield Result("warn", name, "unknown", f"see the line about the {first}")
        except Exception as error:
            yield Result("fail", name, f"{type(error).__name__}: {error}", "reinstall the package named in the error")


def report(results: Iterable[Result], stream: TextIO | None = None) -> int:
    """Print each result as it comes; return the exit status: 2 if the model cannot run, else 1 if any check failed."""
    failed = set()
    for result in results:
        if result.level == "fail":
            failed.add(result.name)
        remedy = f" -> {result.remedy}" if result.remedy else ""
        print(f"{result.level:<4} {result.name:<12} {result.found}{remedy}", file=stream, flush=True)
    return 2 if "model" in failed else 1 if failed else 0


def _sources(settings: ServeSettings) -> list[ModelSource]:
    """Resolve the models, with weights only if they are local: the doctor downloads no weights."""
    return [resolve(model, weights=Path(model).expanduser().is_dir()) for model in settings.model]


def _needs(settings: ServeSettings) -> list[ModelNeeds | None]:
    """Return each model's needs; None if unknown, or if no model resolves, which the model check reports."""
    try:
        return [None if (needs := needs_of(source)) is UNKNOWN else needs for source in _sources(settings)]
    except ConfigError:
        return [None]


def _all_gguf(settings: ServeSettings) -> bool:
    """Return whether every model is a GGUF file, since these are usually quantised. False if one does not resolve."""
    try:
        return all(source.kind == "gguf" for source in _sources(settings))
    except ConfigError:
        return False
