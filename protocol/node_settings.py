"""Settings of all nodes, of adapters beside other engines, and of `kvferry serve` with other engines."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.common_settings import CommonSettings
from kvferry.protocol.setting import setting


@dataclass(frozen=True, kw_only=True)
class NodeSettings(CommonSettings):
    """Settings of every node: its name, role and address."""

    role: str = setting("decode", "role of the node", choices=("prefill", "decode"))
    node_id: str = setting("", "stable name of the node; default: role, host name and port")
    port: int = setting(0, "HTTP port; 0 lets the kernel choose", min=0, max=65535)
    advertise_host: str = setting("", "address at which other processes reach this one; default: --host")
    drain_timeout: float = setting(30.0, "seconds running requests may take to finish after SIGTERM", min=0)


@dataclass(frozen=True, kw_only=True)
class EngineSettings(CommonSettings):
    """Settings of `kvferry adapt` and `kvferry serve` about an engine that is another server."""

    engine_api_key: str = setting(
        "", "API key of the engine; pass it by a file or the environment variable, which other users cannot see"
    )
    engine_api_key_file: str = setting("", "file with the API key of the engine; read again when it changes")
    engine_model: str = setting(
        "", "name by which an OpenAI server knows the model; default: the only one that it serves"
    )
    engine_revision: str = setting(
        "", "name of the weights' version; nodes of one model continue each other's streams only if it is the same"
    )
    engine_timeout: float = setting(600.0, "seconds to wait for the engine to be ready", min=0)
    engine_modalities: str = setting(
        "auto",
        "images, audio and video in prompts; auto: as measured when the node joins, none: only text",
        choices=("auto", "none"),
    )
    engine_pooling: str = setting(
        "auto",
        "how the engine pools vectors of prompts; auto: as the model's files say",
        choices=("auto", "last", "cls", "mean"),
    )
    accept_inexact: bool = setting(
        False,
        "continue streams of lost nodes even where the engine may give other tokens than the lost node would have",
    )
    kv_transfer: str = setting(
        "auto",
        "how the engine fetches KV blocks from another one; auto: as its metrics say",
        choices=("auto", "nixl", "none"),
    )
    kv_lease: float = setting(
        30.0,
        "seconds for which a prefill engine keeps blocks that were not fetched (kv_lease_duration)",
        min=0.1,
    )
    kv_bytes_per_token: int = setting(
        0, "bytes of a token's K and V in the engine, to price transfers; 0: from the model's config.json", min=0
    )


@dataclass(frozen=True, kw_only=True)
class AdapterSettings(NodeSettings, EngineSettings):
    """Settings of `kvferry adapt`, a node whose engine is another server."""

    engine: str = setting("vllm", "kind of the engine", choices=("vllm", "sglang", "llamacpp", "openai"))
    url: str = setting("http://127.0.0.1:8001", "URL of the engine's HTTP server")
    tokenizer: str = setting(
        "",
        "model whose files hold the tokenizer (directory, .gguf file, hub id), for an OpenAI server that sends text "
        "without token ids or does not report its context length",
    )
    kv_events: str = setting("", "ZeroMQ address of the engine's KV events; default: as the engine reports")
    kv_events_replay: str = setting("", "ZeroMQ address that replays KV events; default: as the engine reports")
    decode_graphs_gb: float = setting(
        0.0,
        "GB of GPU memory that an elastic engine needs for CUDA graphs before it decodes; 0: the engine's own default",
        min=0,
    )
    canary_rate: float = setting(
        0.0,
        "share of transferred prompts that a decode engine recomputes to compare tokens, 0 to 1; 0: none",
        min=0,
        max=1,
    )
    worker_ca_certs: str = setting("", "PEM file of authorities that sign decode adapters' certificates")
    worker_server_name: str = setting("", "name that decode adapters' certificates must carry; default: their host")


@dataclass(frozen=True, kw_only=True)
class AttachSettings(EngineSettings):
    """Settings of `kvferry serve` for nodes whose engines are other servers."""

    engine: str = setting(
        "kvferry",
        "engine of the nodes; kvferry: its own workers",
        choices=("kvferry", "vllm", "sglang", "llamacpp", "openai"),
    )
    attach: tuple[str, ...] = setting((), "URL of an engine server that runs already, repeatable; none is started then")
    engine_python: str = setting("python3", "interpreter that has the engine installed; llamacpp: its llama-server")
    prefill_engines: int = setting(
        0, "engines, the first of --attach, that compute prompts for the others by NIXL (vLLM only)", min=0
    )
    engine_args: str = setting("", "further arguments for each engine that is started, as in a shell")


@dataclass(frozen=True, kw_only=True)
class LocalSettings(AttachSettings):
    """Settings of `kvferry serve` about the processes that it starts."""

    routers: int = setting(
        1,
        "routers with ports of their own, from --port on; streams of one that dies continue at another",
        min=1,
        max=16,
    )
