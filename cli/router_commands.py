"""Command lines of the routers of a local cluster, each on a port of its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TypeVar

from kvferry.cli.child import Command
from kvferry.cli.child_commands import Program, settings_command
from kvferry.protocol.common_settings import CommonSettings
from kvferry.protocol.settings import RouterSettings, ServeSettings

Settings = TypeVar("Settings", bound=CommonSettings)


def router_commands(settings: ServeSettings, program: Program) -> list[Command]:
    """Return the commands of all routers, the first of which has --port and the others the ports after it."""
    first = dataclasses.replace(narrowed(RouterSettings, settings), worker_ca_certs="", worker_server_name="")
    commands = [settings_command("router", "router", first, program)]
    for number in range(1, settings.routers):
        name = f"router-{number}"
        place = str(Path(settings.data_dir) / name)
        other = dataclasses.replace(first, port=settings.port + number, data_dir=place)
        commands.append(settings_command(name, "router", other, program))
    return commands


def narrowed(cls: type[Settings], settings: ServeSettings) -> Settings:
    """Return the settings of class `cls` that are part of a cluster's settings."""
    return cls(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(cls)})
