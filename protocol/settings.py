"""Settings of each process: one frozen dataclass, parsed once at the door by the command line.

Every field is a flag (`--max-num-seqs`) and an environment variable (`KVFERRY_MAX_NUM_SEQS`); its `help` metadata is the
flag's help text. Nothing below the door reads the environment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def setting(default: Any, help: str, *, hidden: bool = False) -> Any:
    """A field of a settings class. A hidden one is for the supervisor, not for people: help and README leave it out."""
    return field(default=default, metadata={"help": help, "hidden": hidden})


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """What every process of a cluster needs to know."""

    model: str = setting("smollm2", "Hugging Face directory, hub id, .gguf file, or 'smollm2' (the demo model)")
    redis_url: str = setting("redis://127.0.0.1:6379/0", "Redis or Valkey that holds the node registry and block index")
    cluster: str = setting("default", "name that separates clusters sharing one Redis")
    host: str = setting("127.0.0.1", "address to listen on")
    log_level: str = setting("info", "debug, info, warning or error")
    status_fd: int = setting(-1, "descriptor on which to report loading and readiness; -1: none", hidden=True)


@dataclass(frozen=True, kw_only=True)
class RouterSettings(CommonSettings):
    """Settings of `kvferry router`."""

    port: int = setting(8000, "HTTP port; 0 lets the kernel choose")
    served_model_name: str = setting("", "name clients use for the model; default: derived from --model")
    api_key: str = setting("", "bearer token clients must present; empty: none")
    chat_template: str = setting("", "file with a Jinja chat template that replaces the model's own")
    request_timeout: float = setting(600.0, "seconds a request may take from arrival to its last token")
    max_inflight: int = setting(1024, "requests in progress beyond which new ones get 429")
    local_prefill_tokens: int = setting(0, "prompts with at most this many uncached tokens always prefill on decode")


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(CommonSettings):
    """Settings of `kvferry prefill` and `kvferry decode`."""

    role: str = setting("decode", "prefill or decode (set by the command)")
    node_id: str = setting("", "stable name of the node; default: role, host name and port")
    port: int = setting(0, "HTTP port; 0 lets the kernel choose")
    link_port: int = setting(0, "UCX listener port; 0 lets the kernel choose")
    advertise_host: str = setting("", "address other processes dial; default: --host")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    dtype: str = setting("auto", "auto, float32, bfloat16 or float16")
    threads: int = setting(0, "compute threads on the CPU; 0: all cores")
    block_size: int = setting(16, "tokens per KV block")
    kv_cache_gib: float = setting(0.0, "size of the KV pool in GiB; 0: 1 GiB on a CPU, 80 % of free memory on a GPU")
    kv_blocks: int = setting(0, "number of KV blocks; overrides --kv-cache-gib when not 0")
    max_model_len: int = setting(0, "longest prompt plus output in tokens; 0: the model's own limit")
    max_num_seqs: int = setting(64, "requests generating at once")
    max_num_batched_tokens: int = setting(0, "token budget of one step; 0: 256 on a CPU, 8192 on a GPU")
    max_prefill_tokens_while_decoding: int = setting(
        0, "prompt tokens a step may compute beside running streams; 0: 64 on a CPU, 2048 on a GPU"
    )
    enable_prefix_caching: bool = setting(True, "reuse the blocks of equal prefixes")
    attention: str = setting("auto", "kernels: auto, reference or triton")
    model_impl: str = setting("auto", "auto (own decoder where the family is known), kvferry or transformers")
    verify_checksums: float = setting(1.0, "share of shipped blocks whose checksum is verified, 0 to 1")
    ucx_transports: str = setting("", "UCX_TLS for the link; default: tcp,posix,self and what the device adds")
    ucx_net_devices: str = setting(
        "", "UCX_NET_DEVICES for the link; default: lo for a loopback host, else UCX's own choice"
    )
    grant_timeout: float = setting(30.0, "seconds a prefill waits for a grant")
    drain_timeout: float = setting(30.0, "seconds running requests may take to finish after SIGTERM")


@dataclass(frozen=True, kw_only=True)
class ServeSettings(RouterSettings, WorkerSettings):
    """Settings of `kvferry serve`: a whole local cluster. Router and worker settings are passed on to the children."""

    port: int = setting(8000, "HTTP port of the router")
    prefill: int = setting(1, "prefill processes; 0: decode nodes prefill locally")
    decode: int = setting(1, "decode processes")
    redis_url: str = setting("", "Redis or Valkey to use; empty: start an embedded Valkey server")
