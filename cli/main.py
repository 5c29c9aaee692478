"""The `kvferry` command line: parses each subcommand's settings, and imports its code only then."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

import click

from kvferry.cli.bootstrap import StartupFailed, print_error, set_encoding, set_threads, set_up_traces, worker_threads
from kvferry.cli.client_commands import batch, top
from kvferry.cli.options import SERVE_FIXED, defaults, settings_options
from kvferry.cli.simulate import plan, simulate
from kvferry.protocol.epp_settings import NOT_FOR_EPP, EppSettings
from kvferry.protocol.errors import ConfigError, KvferryError
from kvferry.protocol.node_settings import AdapterSettings
from kvferry.protocol.settings import RouterSettings, ServeSettings, WorkerSettings
from kvferry.runtime.log import set_up_log
from kvferry.runtime.tracing import TRACER


def _say_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Print the version alone: a check of images parses the line."""
    if wanted:
        from kvferry.protocol.version import VERSION

        click.echo(f"kvferry {VERSION}")
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_say_version, help="Show the version."
)
def kvferry() -> None:
    """Serve large language models with prefill and decode on separate pools of workers."""


@kvferry.command()
@settings_options(ServeSettings, SERVE_FIXED)
def serve(settings: ServeSettings) -> None:
    """Run a whole cluster on this machine: Valkey, router, prefill and decode."""
    set_up_log(settings.log_level, settings.log_format)
    from kvferry.cli.serve import check, serve_cluster

    gc.enable()
    asyncio.run(serve_cluster(check(settings)))


@kvferry.command()
@settings_options(RouterSettings)
def router(settings: RouterSettings) -> None:
    """Run one router: the OpenAI API in front of a cluster."""
    set_up_log(settings.log_level, settings.log_format)
    if settings.workers > 1 and settings.worker < 0:
        from kvferry.cli.routers import serve_routers

        gc.enable()
        asyncio.run(serve_routers(settings))
        return
    set_up_traces("router")
    set_encoding()
    from kvferry.router.main import serve_router

    _run(serve_router(settings))


@kvferry.command()
@settings_options(WorkerSettings, {"role": "prefill"})
def prefill(settings: WorkerSettings) -> None:
    """Run one prefill node: computes prompts and ships their KV blocks."""
    _run_worker(settings)


@kvferry.command()
@settings_options(WorkerSettings, {"role": "decode"})
def decode(settings: WorkerSettings) -> None:
    """Run one decode node: receives KV blocks and generates tokens. With Whisper: transcribes speech."""
    _run_worker(settings)


@kvferry.command()
@settings_options(WorkerSettings, {"role": "encode", "elastic": False})
def encode(settings: WorkerSettings) -> None:
    """Run one encode node: turns images and audio of prompts into embeddings for prefill nodes."""
    _run_worker(settings)


@kvferry.command()
@settings_options(AdapterSettings)
def adapt(settings: AdapterSettings) -> None:
    """Run one node beside an engine server: vLLM, SGLang, llama.cpp or any OpenAI server."""
    set_up_log(settings.log_level, settings.log_format)
    set_up_traces("adapter")
    from kvferry.engine_adapter.main import serve_adapter

    _run(serve_adapter(settings))


@kvferry.command()
@settings_options(EppSettings, defaults(EppSettings, NOT_FOR_EPP))
def epp(settings: EppSettings) -> None:
    """Run one endpoint picker: a gateway asks it which engine behind an adapter takes a request."""
    set_up_log(settings.log_level, settings.log_format)
    set_up_traces("epp")
    set_encoding()
    from kvferry.endpoint_picker.main import serve_epp

    _run(serve_epp(settings))


@kvferry.command()
@settings_options(ServeSettings, SERVE_FIXED)
def doctor(settings: ServeSettings) -> int:
    """Check what a cluster needs of this machine.

    Says what to do about each failure. Takes the flags of `serve`, so that what it checks is what `serve` would do."""
    settings = dataclasses.replace(settings, threads=worker_threads(settings.threads, settings.tensor_parallel_size))
    set_threads(settings.threads)
    set_up_log("error")
    from kvferry.cli.doctor import CHECKS, all_checks, report
    from kvferry.cli.engine_doctor import engine_checks

    return report(all_checks(settings, engine_checks(settings) if settings.attach else CHECKS))


@kvferry.command()
@click.argument("tenant")
def key(tenant: str) -> None:
    """Make an API key for a tenant: the key, and its lines for the file that --api-keys names.

    The lines go to stdout and hold only the key's hash, so that they can be appended to the file; the key goes to
    stderr and is kept nowhere."""
    from kvferry.router.tenants.keys import entry, new_key

    made = new_key()
    lines = entry(tenant, made)
    click.echo(f"The key of {tenant}, shown only once: {made}", err=True)
    click.echo(lines, nl=False)


@kvferry.command()
@click.option("--ready", is_flag=True, help="check readiness, not only liveness")
@click.option("--pid", default=1, show_default=True, help="id of the process to check")
def health(ready: bool, pid: int) -> int:
    """Ask the kvferry that a container runs whether it is well: exit status 0, or 1 and why.

    Where it listens is read from its own command line. For HEALTHCHECK in images and for docker compose; Kubernetes
    asks over HTTP itself."""
    from kvferry.cli.health import ask

    return ask(kvferry, pid, "/ready" if ready else "/health")


@kvferry.command()
def version() -> None:
    """Print the version, and the wire version, in which the processes of a cluster must agree."""
    from kvferry.protocol.layout import WIRE_VERSION
    from kvferry.protocol.version import VERSION

    click.echo(f"kvferry {VERSION} (wire version {WIRE_VERSION})")


for command in (batch, top, simulate, plan):
    kvferry.add_command(command)


def run(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status: 2 for a user's mistake, with one line on stderr."""
    try:
        status = kvferry.main(args=argv, prog_name="kvferry", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        print_error(f"{error.format_message()} (see kvferry {_command_of(error)}--help)")
        return error.exit_code
    except StartupFailed as error:
        print_error(str(error))
        return error.exit_status
    except KvferryError as error:
        print_error(error.message)
        return 2 if isinstance(error, ConfigError) else 1
    except (click.Abort, KeyboardInterrupt):
        return 130


def main() -> None:
    """Entry point of the console script.

    It does not return: all resources are closed, and the teardown of an interpreter with torch costs a second of the
    five in which a cluster must be gone. Garbage collection starts in `_run`, so that it never scans the imported
    modules."""
    gc.disable()
    status = run()
    TRACER.close()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


def _command_of(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f"{context.info_name} " if context is not None and context.parent is not None else ""


def _run_worker(settings: WorkerSettings) -> None:
    settings = dataclasses.replace(settings, threads=worker_threads(settings.threads, settings.ranks_per_host))
    set_threads(settings.threads)
    set_up_log(settings.log_level, settings.log_format)
    set_up_traces(settings.role)
    from kvferry.cli.worker_mains import worker_main

    _run(worker_main(settings))


def _run(main: Coroutine[Any, Any, None]) -> None:
    import uvloop

    gc.freeze()
    gc.enable()
    uvloop.run(main)


if __name__ == "__main__":
    main()
