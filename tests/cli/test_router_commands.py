"""Several routers of a local cluster."""

from __future__ import annotations

from pathlib import Path

from kvferry.cli.router_commands import router_commands
from kvferry.protocol.settings import ServeSettings


def test_each_router_has_a_port_and_a_folder_of_its_own() -> None:
    settings = ServeSettings(routers=3, port=8100, data_dir="/data", redis_url="redis://r", cluster_secret="s" * 32)
    commands = router_commands(settings, lambda subcommand: ["kvferry", subcommand])
    assert [command.name for command in commands] == ["router", "router-1", "router-2"]
    lines = [" ".join(command.argv) for command in commands]
    assert [f"--port {port}" in line for line, port in zip(lines, (8100, 8101, 8102), strict=True)] == [True] * 3
    assert [str(Path("/data") / f"router-{number}") in lines[number] for number in (1, 2)] == [True, True]
    assert all("--redis-url redis://r" in line for line in lines)


def test_one_router_is_the_default() -> None:
    (command,) = router_commands(ServeSettings(), lambda subcommand: ["kvferry", subcommand])
    assert command.name == "router"
