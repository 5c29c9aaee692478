"""Command lines that start kvferry's own child processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvferry.cli.child import Command
from kvferry.cli.options import to_argv, variable
from kvferry.cluster_state.redis_url import has_password
from kvferry.protocol.common_settings import CommonSettings
from kvferry.protocol.node_settings import AdapterSettings
from kvferry.protocol.settings import RouterSettings, WorkerSettings

PREFILL_NICENESS = 5
"""Niceness of prefill and encode processes, so that running streams keep three quarters of the shared cores."""

Program = Callable[[str], Sequence[str]]
"""Function from a subcommand (`router`) to the start of the command line that runs it."""


def kvferry_program(subcommand: str) -> list[str]:
    """Return the console script beside this interpreter, so that `ps` shows it; the module in a bare checkout."""
    script = Path(sys.executable).with_name("kvferry")
    return [str(script), subcommand] if script.exists() else [sys.executable, "-m", "kvferry.cli.main", subcommand]


def settings_command(name: str, subcommand: str, settings: CommonSettings, program: Program) -> Command:
    """Return the command that runs a subcommand with these settings; secrets go into its environment."""
    env = {variable("cluster_secret"): settings.cluster_secret}
    if isinstance(settings, RouterSettings) and settings.api_key:
        env[variable("api_key")] = settings.api_key
    if isinstance(settings, WorkerSettings) and settings.scale_out_api_key:
        env[variable("scale_out_api_key")] = settings.scale_out_api_key
    if isinstance(settings, AdapterSettings) and settings.engine_api_key:
        env[variable("engine_api_key")] = settings.engine_api_key
    skip = {"api_key", "cluster_secret", "engine_api_key", "scale_out_api_key", "status_fd"}
    if not isinstance(settings, AdapterSettings):
        skip.add("role")  # the subcommand determines it
    if has_password(settings.redis_url):
        env[variable("redis_url")] = settings.redis_url
        skip.add("redis_url")
    argv = (*program(subcommand), *to_argv(settings, skip=skip))
    given = (settings.cores_fd, settings.weights_fd) if isinstance(settings, WorkerSettings) else ()
    shared = tuple(descriptor for descriptor in given if descriptor >= 0)
    yields = subcommand in ("prefill", "encode") and not settings.elastic  # a process cannot raise its priority again
    niceness = PREFILL_NICENESS if yields else 0
    return Command(name, argv, env, niceness=niceness, fds=shared)
