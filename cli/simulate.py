"""`kvferry simulate` and `kvferry plan`: command lines of the cluster simulator (package simulate)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvferry.protocol.errors import ConfigError, RegistryUnavailable

if TYPE_CHECKING:
    from kvferry.simulate.machine import Machine

RATES = (
    ("prefill-rate", "prefill_tokens_per_s", float, "prompt tokens per second of a node"),
    ("step", "step_s", float, "seconds of a decode step without streams"),
    ("stream-step", "stream_s", float, "seconds that each stream adds to a decode step"),
    ("ship-rate", "ship_bytes_per_s", float, "bytes per second of a node's link"),
    ("block-size", "block_size", int, "tokens per KV block"),
    ("block-bytes", "block_bytes", int, "bytes of a KV block"),
    ("kv-blocks", "blocks", int, "KV blocks per node"),
    ("page-blocks", "page_blocks", int, "KV blocks of a page of layers with windows"),
    ("window-pages", "window_pages", int, "maximum number of such pages per sequence"),
    ("max-num-seqs", "max_num_seqs", int, "concurrent streams per node"),
    ("kv-host-blocks", "host_blocks", int, "KV blocks in the host memory tier of a node"),
    ("host-read", "host_block_s", float, "seconds in which a block is read from there"),
    ("kv-disk-blocks", "disk_blocks", int, "KV blocks in the disk tier of a node"),
    ("disk-read", "disk_block_s", float, "seconds in which a block is read from there"),
    ("encode-rate", "media_tokens_per_s", float, "tokens of images and audio per second of an encode node"),
    ("audio-tokens", "audio_tokens_per_s", float, "tokens that stand for a second of audio"),
    ("media-cache", "media_cache_tokens", int, "tokens of images and audio whose encodings a node keeps"),
    ("overhead", "overhead_s", float, "seconds before a request's first token, other than queueing and computing"),
    (
        "beside",
        "beside",
        float,
        "share of its speed that a prefill node keeps while streams run on the same cores; 1: separate cores",
    ),
)
"""Flags of a node's rates: flag, field of Machine, type, help."""
FLAGS = {
    **{field: f"--{name}" for name, field, _, _ in RATES}, "ttft_s": "--ttft", "ttft_ktoken_s": "--ttft-ktoken",
    "itl_s": "--itl", "redis_url": "--calibrate",
    **{name: f"--{name}" for name in (
        "calibrate", "decode", "eviction", "itl", "load", "model", "plot", "policy", "probe", "rate", "reuse", "share",
        "trace", "ttft", "workload",
    )},
}  # fmt: skip
"""Flag to show for the field that a ConfigError names."""


def machine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a node's rates; defaults come from --calibrate, or are those of one large GPU."""
    for name, field, kind, text in reversed(RATES):
        command = click.option(f"--{name}", field, type=kind, help=text)(command)
    command = click.option(
        "--api-key", default="", envvar="KVFERRY_API_KEY", show_envvar=True, help="API key of the probed router"
    )(command)
    command = click.option(
        "--probe", metavar="URL", help="measure further rates by requests to this router, which should be idle"
    )(command)
    command = click.option("--model", default="", help="model to measure if the running cluster serves several")(
        command
    )
    command = click.option("--cluster", default="default", show_default=True, help="--cluster of the running cluster")(
        command
    )
    return click.option(
        "--calibrate", metavar="URL", help="take the rates from the leases of the running cluster in this Redis"
    )(command)


def goal_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of latency goals to a command."""
    for name, default, text in (
        ("itl", 0.05, "goal for the mean inter-token latency of a request, in seconds"),
        ("ttft-ktoken", 0.25, "additional seconds for each thousand prompt tokens"),
        ("ttft", 1.0, "goal for the time to first token, in seconds"),
    ):
        command = click.option(f"--{name}", type=float, default=default, show_default=True, help=text)(command)
    return command


@click.command()
@click.option("--workload", multiple=True, help="generated workload, repeatable; default: all")
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    help="trace to replay instead of workloads: JSON lines in Mooncake's format",
)
@click.option("--policy", multiple=True, help="routing policy, repeatable; default: all")
@click.option("--prefill", default=8, show_default=True, type=click.IntRange(0, 100_000), help="prefill nodes")
@click.option("--decode", default=8, show_default=True, type=click.IntRange(1, 100_000), help="decode nodes")
@click.option("--encode", default=0, show_default=True, type=click.IntRange(0, 100_000), help="encode nodes")
@click.option(
    "--requests",
    default=3000,
    show_default=True,
    type=click.IntRange(1),
    help="requests of each workload, or of the trace",
)
@click.option(
    "--load",
    multiple=True,
    default=(1.0,),
    show_default=True,
    type=float,
    help="multiple of the usual arrival rate; repeatable",
)
@click.option(
    "--targets",
    is_flag=True,
    help="treat the goals as a tenant's latency targets (ttft_ms, itl_ms): requests that would miss them are rejected",
)
@click.option(
    "--seed",
    multiple=True,
    default=(1,),
    show_default=True,
    help="seed of the generators; repeat it for medians over several",
)
@click.option(
    "--eviction",
    default="value",
    show_default=True,
    help="eviction policy of the pool: value (the engine's own), lru, slru, s3fifo, gdsf, gdsf-cost",
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="file for an SVG plot of the results")
@goal_options
@machine_options
def simulate(**options: Any) -> int:
    """Compare placement policies on a virtual clock.

    Requests go through the router's own node table, index and placement, and through simulated nodes with the engine's
    own block pools. Rules of other routers are simulated beside it, with the same nodes."""
    from kvferry.simulate.command import simulate_command

    gc.enable()
    with _flags_named():
        return simulate_command(_machine(options), click.echo, **options)


@click.command()
@click.option("--rate", required=True, type=float, help="requests per second")
@click.option("--prompt", required=True, type=click.IntRange(1), help="mean tokens of a prompt")
@click.option("--output", required=True, type=click.IntRange(1), help="mean tokens of an output")
@click.option("--reuse", default=0.0, show_default=True, type=click.FloatRange(0, 0.99),
              help="share of prompt tokens that are shared")  # fmt: skip
@click.option("--image-tokens", default=0, show_default=True, type=click.IntRange(0),
              help="mean tokens of a prompt that stand for images, which encode nodes encode")  # fmt: skip
@click.option("--audio-seconds", "audio_s", default=0.0, show_default=True, type=click.FloatRange(0),
              help="mean seconds of audio of a prompt, which encode nodes encode")  # fmt: skip
@click.option(
    "--share",
    default=0.99,
    show_default=True,
    type=click.FloatRange(0.5, 1.0),
    help="share of requests that must meet the goal",
)
@click.option(
    "--requests", default=3000, show_default=True, type=click.IntRange(100), help="requests simulated for each check"
)
@click.option("--seed", default=1, show_default=True, help="seed of the requests")
@goal_options
@machine_options
def plan(**options: Any) -> int:
    """Estimate how many nodes of each role a load needs.

    A first guess by arithmetic, then checked and corrected by simulation."""
    from kvferry.simulate.plan import plan_command

    gc.enable()
    with _flags_named():
        return plan_command(_machine(options), click.echo, **options)


@contextlib.contextmanager
def _flags_named() -> Iterator[None]:
    """Prefix the message of a ConfigError with the flag that caused it."""
    try:
        yield
    except ConfigError as error:
        flag = FLAGS.get(error.param or "", "")
        raise ConfigError(f"{flag}: {error.message}" if flag else error.message, param=error.param) from error


def _machine(options: dict[str, Any]) -> Machine:
    """Build the machine from the options, and remove the options that it uses. Raises ConfigError."""
    from kvferry.simulate.machine import Machine

    given = {field: options.pop(field) for _, field, _, _ in RATES}
    url, cluster, machine = options.pop("calibrate"), options.pop("cluster"), Machine()
    router, api_key, model = options.pop("probe"), options.pop("api_key"), options.pop("model")
    if url:
        from kvferry.simulate.calibrate import calibrated, leases_of

        try:
            machine = calibrated(asyncio.run(leases_of(url, cluster, model)), machine)
        except RegistryUnavailable as error:
            raise ConfigError(error.message, param="calibrate") from error
    if router:
        from kvferry.simulate.rate_probe import probed

        machine = asyncio.run(probed(router, machine, api_key, model))
    return dataclasses.replace(machine, **{field: value for field, value in given.items() if value is not None})
