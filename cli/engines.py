"""Engines of others in `kvferry serve`: their command lines, and an adapter beside each."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.cli.child import Command
from kvferry.cli.child_commands import Program, settings_command
from kvferry.cli.preflight import free_port
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.node_settings import AdapterSettings
from kvferry.protocol.settings import ServeSettings
from kvferry.runtime.address import host_port, loopback

NICENESS = 5
"""Niceness of an engine: one that spins on all cores must not cost router and adapter their signs of life."""
EVENTS_KEPT = 10_000
"""Batches of KV events that an engine keeps for a reader that lost some."""


@dataclass(frozen=True, slots=True)
class Start:
    """What an engine is started with. kv_events, kv_events_replay: ZeroMQ addresses that it binds to."""

    model: str
    name: str
    host: str
    port: int
    kv_events: str
    kv_events_replay: str

    @property
    def publisher(self) -> dict[str, object]:
        """Return the part of the KV events' configuration that engines share."""
        return {
            "publisher": "zmq",
            "endpoint": self.kv_events,
            "replay_endpoint": self.kv_events_replay,
            "buffer_steps": EVENTS_KEPT,
        }


def attached(settings: ServeSettings) -> bool:
    """Return whether the nodes are engines of others."""
    return bool(settings.attach) or settings.engine != "kvferry"


def checked_engines(settings: ServeSettings) -> ServeSettings:
    """Return the settings with the number of nodes that follows from --attach. Raises ConfigError."""
    if len(settings.model) > 1:
        raise ConfigError("other engines need a single model; start the adapters of several separately", param="model")
    if settings.attach and settings.engine == "kvferry":
        raise ConfigError("--attach needs --engine: vllm, sglang, llamacpp or openai", param="engine")
    if not settings.attach and settings.engine == "openai":
        raise ConfigError("--engine openai needs --attach with the server's URL", param="attach")
    return dataclasses.replace(settings, prefill=0, decode=len(settings.attach) or settings.decode)


def engine_commands(settings: ServeSettings, model: str, name: str, program: Program, folder: Path) -> list[Command]:
    """Return the commands of the engines that `serve` starts itself, and of an adapter for each engine.

    model: directory or file of the model. name: by which requests call it. folder: of mode 0700, for the sockets of KV
    events, which hold the tokens of prompts."""
    host, commands = loopback(), []
    urls, events = list(settings.attach), list[tuple[str, str]]()
    if not urls:
        for number in range(settings.decode):
            port = free_port(host, 0)
            events.append((f"ipc://{folder}/events-{number}", f"ipc://{folder}/replay-{number}"))
            start = Start(model, name, host, port, *events[number])
            argv = (*ENGINES[settings.engine](settings.engine_python, start), *shlex.split(settings.engine_args))
            url = f"http://{host_port(host, port)}"
            commands.append(Command(f"engine-{number}", argv, reports=False, niceness=NICENESS, address=url))
            urls.append(url)
    for number, url in enumerate(urls):
        published, replayed = events[number] if events and settings.engine != "llamacpp" else ("", "")
        adapter = AdapterSettings(
            **{
                field.name: getattr(settings, field.name)
                for field in dataclasses.fields(AdapterSettings)
                if hasattr(settings, field.name)
            }
        )
        adapter = dataclasses.replace(
            adapter, url=url, role="decode", node_id=f"adapter-{number}", host=host, port=0, served_model_name=(name,),
            ssl_certfile="", ssl_keyfile="", ssl_ca_certs="",
            kv_events=published, kv_events_replay=replayed, tokenizer=model if settings.engine == "openai" else "",
        )  # fmt: skip
        commands.append(settings_command(f"adapter-{number}", "adapt", adapter, program))
    return commands


def _vllm(python: str, start: Start) -> Sequence[str]:
    return (
        python, "-m", "vllm.entrypoints.openai.api_server", "--host", start.host, "--port", str(start.port),
        "--model", start.model, "--served-model-name", start.name, "--enable-scale-out",
        "--enable-prompt-tokens-details",
        "--kv-events-config", json.dumps({"enable_kv_cache_events": True, **start.publisher}),
    )  # fmt: skip


def _sglang(python: str, start: Start) -> Sequence[str]:
    return (
        python, "-m", "sglang.launch_server", "--host", start.host, "--port", str(start.port), "--model-path",
        start.model, "--served-model-name", start.name, "--page-size", "16", "--enable-metrics",
        "--kv-events-config", json.dumps(start.publisher),
    )  # fmt: skip


def _llamacpp(server: str, start: Start) -> Sequence[str]:
    return (
        server, "--host", start.host, "--port", str(start.port), "-m", start.model, "--alias", start.name, "--slots"
    )  # fmt: skip


ENGINES: dict[str, Callable[[str, Start], Sequence[str]]] = {"vllm": _vllm, "sglang": _sglang, "llamacpp": _llamacpp}
"""Command lines of engines by kind, from the interpreter or program."""
