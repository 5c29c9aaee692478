"""Other engines (vLLM, SGLang, llama.cpp) in `kvferry serve`: command lines of the engines and their adapters."""

from __future__ import annotations

import dataclasses
import json
import math
import os
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
"""Niceness of an engine: one that spins on all cores must not delay the heartbeats of router and adapter."""
NO_PINNING = ("VLLM_CPU_OMP_THREADS_BIND", "nobind")
"""Environment variable that keeps vLLM from pinning its threads to cores of a CPU, and its value."""
KEPT_EVENT_BATCHES = 10_000
"""Number of batches of KV events that an engine keeps for a reader that lost some of them."""


@dataclass(frozen=True, slots=True)
class Start:
    """Parameters with which an engine is started.

    kv_events, kv_events_replay: ZeroMQ addresses that it binds to. kv_lease: seconds for which it keeps the blocks of a
    prompt for another engine; 0: it transfers none."""

    model: str
    name: str
    host: str
    port: int
    kv_events: str
    kv_events_replay: str
    kv_lease: float = 0.0

    @property
    def publisher(self) -> dict[str, object]:
        """Return the part of the KV events' configuration that engines share."""
        return {
            "publisher": "zmq",
            "endpoint": self.kv_events,
            "replay_endpoint": self.kv_events_replay,
            "buffer_steps": KEPT_EVENT_BATCHES,
        }


def attached(settings: ServeSettings) -> bool:
    """Return whether the nodes' engines are other servers."""
    return bool(settings.attach) or settings.engine != "kvferry"


def checked_engines(settings: ServeSettings) -> ServeSettings:
    """Return the settings with the number of nodes that follows from --attach. Raises ConfigError."""
    if len(settings.model) > 1:
        raise ConfigError("other engines need a single model; start the adapters of several separately", param="model")
    if settings.attach and settings.engine == "kvferry":
        raise ConfigError("--attach needs --engine: vllm, sglang, llamacpp or openai", param="engine")
    if not settings.attach and settings.engine == "openai":
        raise ConfigError("--engine openai needs --attach with the server's URL", param="attach")
    if settings.elastic:
        raise ConfigError(
            "--elastic with other engines needs adapters started separately: kvferry adapt --engine sglang --elastic",
            param="elastic",
        )
    prefill = settings.prefill_engines
    if prefill and (settings.engine != "vllm" or settings.kv_transfer == "none"):
        raise ConfigError("--prefill-engines needs --engine vllm and NIXL", param="prefill_engines")
    if settings.attach and prefill >= len(settings.attach):
        raise ConfigError(
            f"--prefill-engines {prefill} leaves none of the {len(settings.attach)} attached engines to decode",
            param="prefill_engines",
        )
    decode = len(settings.attach) - prefill if settings.attach else settings.decode
    return dataclasses.replace(settings, prefill=prefill, decode=decode)


def engine_commands(settings: ServeSettings, model: str, name: str, program: Program, folder: Path) -> list[Command]:
    """Return the commands of the engines that `serve` starts itself, and of an adapter for each engine.

    The first `prefill_engines` engines compute prompts for the other engines.
    model: directory or file of the model. name: the model's name in requests. folder: of mode 0700, for the sockets of
    KV events, which contain the tokens of prompts."""
    host, commands = loopback(), []
    urls, events = list(settings.attach), list[tuple[str, str]]()
    if not urls:
        kv_lease = settings.kv_lease if settings.prefill_engines else 0.0
        for number in range(settings.prefill_engines + settings.decode):
            port = free_port(host, 0)
            events.append((f"ipc://{folder}/events-{number}", f"ipc://{folder}/replay-{number}"))
            start = Start(model, name, host, port, *events[number], kv_lease)
            argv = (*ENGINES[settings.engine](settings.engine_python, start), *shlex.split(settings.engine_args))
            url = f"http://{host_port(host, port)}"
            env = transfer_env(host) if kv_lease else {}
            commands.append(Command(f"engine-{number}", argv, env, reports=False, niceness=NICENESS, address=url))
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
            adapter, url=url, role="prefill" if number < settings.prefill_engines else "decode",
            node_id=f"adapter-{number}", host=host, port=0, served_model_name=(name,),
            ssl_certfile="", ssl_keyfile="", ssl_ca_certs="", worker_ca_certs="", worker_server_name="",
            kv_transfer="nixl" if settings.prefill_engines else settings.kv_transfer,
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
        *(("--kv-transfer-config", json.dumps(nixl(start.kv_lease))) if start.kv_lease else ()),
    )  # fmt: skip


def nixl(kv_lease: float) -> dict[str, object]:
    """Return vLLM's kv_transfer_config. kv_lease: seconds for which a prompt's blocks are kept for another engine.

    "recompute": blocks that cannot be fetched are computed; by default the request would fail."""
    return {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": math.ceil(kv_lease)},
        **({} if has_gpu() else {"kv_buffer_device": "cpu"}),
    }


def transfer_env(host: str) -> dict[str, str]:
    """Return the environment of an engine that transfers blocks: a side channel of its own.

    On a CPU a NIXL thread spins: pinned to a core that computes, it would block the engine for minutes."""
    env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port(host, 0))}
    if not has_gpu() and NO_PINNING[0] not in os.environ:
        env[NO_PINNING[0]] = NO_PINNING[1]
    return env


def has_gpu() -> bool:
    """Return whether this machine has a GPU device of NVIDIA or AMD."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


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
