"""Subcommands that are clients of a running server: `batch` and `top`."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import click

from kvferry.cli.options import router_options
from kvferry.runtime.log import set_up_log


@click.command()
@click.argument("source", type=click.Path(dir_okay=False, path_type=Path), metavar="INPUT")
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path), metavar="OUTPUT")
@router_options
@click.option("--concurrency", type=click.IntRange(1, 4096), default=32, show_default=True, help="concurrent requests")
@click.option("--timeout", type=click.FloatRange(0.1), default=600.0, show_default=True, help="seconds per request")
@click.option("--patience", type=click.FloatRange(0), default=60.0, show_default=True,
              help="seconds to wait for a router that is unreachable, full or without nodes")  # fmt: skip
def batch(source: Path, target: Path, **options: Any) -> int:
    """Answer the requests of INPUT through a running server.

    Both are JSON lines as of OpenAI's batches. A row that OUTPUT already answers is not asked again, so
    that an interrupted run can be repeated; failed rows are asked again. Exit status 1 if any row failed."""
    set_up_log("warning")
    from kvferry.cli.batch import BatchClient, run_batch

    gc.enable()
    return asyncio.run(run_batch(source, target, BatchClient(**options)))


@click.command()
@router_options
@click.option("--interval", type=click.FloatRange(0.2), default=1.0, show_default=True, help="seconds between updates")
@click.option("--once", is_flag=True, help="print the state once and exit, as without a terminal")
def top(url: str, api_key: str, interval: float, once: bool) -> int:
    """Watch a running cluster in the terminal; q leaves.

    Nodes with their load and block pools, what was reused and what was missed, transfers, requests with their routes,
    retries: what the page at /dashboard shows."""
    from kvferry.cli.top import TopOptions, run_top

    gc.enable()
    return run_top(TopOptions(url, api_key, interval), once=once)
