"""Settings of router, workers and `kvferry serve` as frozen dataclasses, which the command line parses.

Every field is a flag (`--max-num-seqs`) and an environment variable (`KVFERRY_MAX_NUM_SEQS`). Only the command line
reads the environment."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.batch_settings import BatchSettings
from kvferry.protocol.host_settings import HostSettings
from kvferry.protocol.layout import CACHE_DTYPES
from kvferry.protocol.media_settings import NodeMediaSettings
from kvferry.protocol.node_settings import LocalSettings
from kvferry.protocol.resume_settings import ResumeSettings
from kvferry.protocol.setting import setting

CPU_POOL_GIB = 1.0
"""Default size of a worker's KV pool on a CPU, in GiB."""
MAX_GIB = 2**20
"""Maximum size of any memory setting in GiB, a PiB; it rejects infinity."""
DEMO = "smollm2"
MODEL = f"Hugging Face directory, hub id, .gguf file, or '{DEMO}' (the demo model)"
QUEUE_TIMEOUT = "seconds a request waits while no node can take it; then 503 if there is no node, 429 if all are full"
CANARY_WEIGHT = "share (0 to 1) of new requests for the nodes of --canary-engine, while they can decode; -1: no canary"
CANARY_ENGINE = "prefix of the canary's engine (vllm 0.32) or fingerprint; newest: the version that joined last"
MODELS = f"{MODEL}; repeat it for several models, with --served-model-name in the same order"


@dataclass(frozen=True, kw_only=True)
class RouterSettings(BatchSettings, ResumeSettings):
    """Settings of `kvferry router`."""

    port: int = setting(8000, "HTTP port; 0 lets the kernel choose", min=0, max=65535)
    workers: int = setting(1, "router processes that share the port; limits apply to each of them", min=1, max=64)
    worker: int = setting(-1, "index of this router process; -1: the parent that starts them", hidden=True)
    workers_dir: str = setting("", "directory of the router processes' sockets", hidden=True)
    model: tuple[str, ...] = setting((DEMO,), MODELS)
    pooling: str = setting(
        "auto",
        "pooling of token vectors; auto: from the model's files, else last (decoders) or mean (encoders)",
        choices=("auto", "last", "cls", "mean"),
    )
    api_key: str = setting("", "API key that clients must send as a bearer token; empty: none")
    api_keys: str = setting("", "file of hashed API keys, tenants and limits, reloaded on changes; see kvferry key")
    share_prefixes: bool = setting(
        False, "let tenants reuse each other's cached prefixes; response times then reveal what others have cached"
    )
    max_queued: int = setting(512, "queued requests of one tenant beyond which new ones get 429", min=1)
    allowed_origins: str = setting("", "allowed CORS origins, separated by commas; *: any; empty: none")
    allowed_methods: str = setting("*", "allowed CORS methods, separated by commas; *: any")
    allowed_headers: str = setting("*", "allowed CORS headers, separated by commas; *: any")
    allow_credentials: bool = setting(False, "allow CORS requests with credentials (cookies, HTTP authentication)")
    root_path: str = setting("", "path prefix under which a proxy serves this server, such as /llm")
    worker_ca_certs: str = setting("", "PEM file of authorities that sign workers' certificates, which all must have")
    worker_server_name: str = setting("", "name that workers' certificates must carry; default: each worker's host")
    chat_template: str = setting("", "file with a Jinja chat template that replaces the model's own; one model only")
    strict_templates: bool = setting(
        False, "reject chats that the chat template refuses, instead of adapting their messages to it"
    )
    tool_call_parser: str = setting(
        "auto",
        "parser of tool calls; auto: chosen by the chat template, none: off",
        choices=("auto", "none", "hermes", "llama3_json", "mistral", "openai", "pythonic"),
    )
    reasoning_parser: str = setting(
        "auto",
        "parser of reasoning; auto: chosen by the chat template, none: reasoning stays in the text",
        choices=("auto", "none", "deepseek_r1", "qwen3", "granite", "mistral", "openai_gptoss"),
    )
    generation_config: str = setting(
        "auto",
        "sampling defaults; auto: those of the model's generation_config.json, none: the API's own",
        choices=("auto", "none"),
    )
    request_timeout: float = setting(600.0, "seconds from a request's arrival to its last token, at most", min=0)
    queue_timeout: float = setting(10.0, QUEUE_TIMEOUT, min=0)
    max_inflight: int = setting(1024, "requests in progress beyond which new ones get 429", min=1)
    allow_lora_updates: bool = setting(False, "let clients load LoRA adapters from the nodes' disks, and unload them")
    max_body_mib: int = setting(16, "request bodies longer than this many MiB get 413", min=1)
    max_prompt_tokens: int = setting(
        2**20, "total tokens of several texts in one request; a single text may fill the context", min=1
    )
    header_timeout: float = setting(10.0, "seconds a client may take to send a request's header; 0: any", min=0)
    body_timeout: float = setting(30.0, "seconds that may pass between two parts of a body; 0: any", min=0)
    min_body_rate: float = setting(
        500.0, "bytes per second below which a body upload or the reading of a response is aborted; 0: any", min=0
    )
    reader_timeout: float = setting(30.0, "seconds a response may wait for a slow client; 0: any", min=0)
    max_connections_per_address: int = setting(
        4096, "open connections per address; 0: any. Behind a proxy all clients share the proxy's address", min=0
    )
    elastic_rest: float = setting(30.0, "seconds for which roles stay unchanged after a change", min=0)
    response_ttl: float = setting(3600.0, "seconds for which /v1/responses stores a response; 0: off", min=0)
    response_store_mib: int = setting(64, "MiB of stored responses per tenant; the oldest are evicted first", min=1)
    buddies: bool = setting(
        True,
        "copy the KV blocks of running streams to the nodes that computed their prompts, so that little is "
        "recomputed when a decode node is lost",
    )
    fetch: bool = setting(
        False, "let nodes fetch a prompt's blocks from other nodes where that is faster than computing them"
    )
    local_prefill_tokens: int = setting(
        0, "prompts of at most this many uncached tokens prefill on a decode node", min=0
    )
    canary_weight: float = setting(-1.0, CANARY_WEIGHT, min=-1, max=1)
    canary_engine: str = setting("newest", CANARY_ENGINE)
    canary_by: str = setting(
        "request", "unit that goes to the canary nodes: single requests or whole tenants", choices=("request", "tenant")
    )


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(HostSettings, NodeMediaSettings):
    """Settings of `kvferry prefill`, `kvferry decode` and `kvferry encode`."""

    model: str = setting(DEMO, MODEL)
    link_port: int = setting(0, "port for KV transfer; 0 lets the kernel choose", min=0, max=65535)
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    dtype: str = setting(
        "auto",
        "dtype of weights, and of K and V unless --kv-cache-dtype differs",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    load_format: str = setting(
        "auto",
        "source of the weights; auto: the model's files, dummy: random, from config.json",
        choices=("auto", "dummy"),
    )
    kv_cache_dtype: str = setting(
        "auto", "dtype of K and V; auto: that of --dtype, fp8: fp8_e4m3", choices=("auto", *CACHE_DTYPES)
    )
    quantization: str = setting(
        "auto",
        "quantization of dense layers; auto: as stored in the GGUF or checkpoint, none: dequantized to --dtype, "
        "int8: quantized per channel",
        choices=("auto", "none", "int8"),
    )
    threads: int = setting(0, "CPU compute threads per rank; 0: all cores, in equal parts", min=0)
    enable_expert_parallel: bool = setting(False, "give each rank whole experts instead of a part of each")
    block_size: int = setting(16, "tokens per KV block", min=1)
    kv_cache_gib: float = setting(
        0.0,
        "size of the KV pool in GiB; 0: 1 GiB on a CPU, on a GPU what --gpu-memory-utilization leaves",
        min=0,
        max=MAX_GIB,
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "share of a GPU's memory for weights, the largest step, which is measured at start, and the KV pool; unused "
        "with --kv-cache-gib or --kv-blocks",
        min=0.05, max=1.0,
    )  # fmt: skip
    kv_blocks: int = setting(0, "number of KV blocks; overrides --kv-cache-gib unless 0", min=0)
    kv_host_gib: float = setting(
        0.0, "GiB of host memory per node for blocks evicted from a GPU's pool", min=0, max=MAX_GIB
    )
    kv_disk_path: str = setting(
        "",
        "directory for blocks evicted from the pool, kept across restarts; empty: none. Anyone who can read it can "
        "read clients' prompts",
    )
    kv_disk_gib: float = setting(10.0, "GiB of --kv-disk-path that each node may use", min=0.001, max=MAX_GIB)
    kv_remote_url: str = setting(
        "",
        "object store for blocks that all nodes share: s3://bucket/folder, gs://, az://, or "
        "file:///a/shared/directory; empty: none. Anyone who can read it can read clients' prompts",
    )
    kv_remote_gib: float = setting(
        0.0,
        "GiB of one model's blocks that the nodes keep in that store; 0: no limit",
        min=0,
        max=MAX_GIB,
    )
    max_model_len: int = setting(0, "longest prompt plus output in tokens; 0: the model's own limit", min=0)
    max_num_seqs: int = setting(64, "requests that generate at the same time", min=1)
    itl_target_ms: float = setting(
        50.0,
        "target of inter-token latency in milliseconds: prompts in a step with streams, or on cores shared with them"
        " (`serve`), stay within it, and the decode pool should grow above it; a step takes longer only while more "
        "prompts wait than streams run, in proportion",
        min=0,
    )
    max_num_batched_tokens: int = setting(
        0, "token budget of one step; 0: 256 on a CPU, 512 with AMX, 8192 on a GPU", min=0
    )
    max_prefill_tokens_while_decoding: int = setting(
        0,
        "prompt tokens a step may compute beside running streams, fewer where it would take longer than "
        "--itl-target-ms; 0: 256 on a CPU, 2048 on a GPU",
        min=0,
    )
    num_speculative_tokens: int = setting(
        0,
        "draft tokens per stream and step, proposed from earlier text of the same stream (prompt lookup) or by "
        "--speculative-model; outputs do not change; 0: none",
        min=0,
        max=64,
    )
    speculative_model: str = setting("", "draft model of the same vocabulary, given like --model")
    enable_prefix_caching: bool = setting(True, "reuse the KV blocks of equal prefixes")
    kernels: str = setting(
        "auto",
        "kernels for all of a model's operations; auto: triton on a GPU, cpu where its extension is installed",
        choices=("auto", "reference", "cpu", "triton"),
        former="attention",
    )
    enforce_eager: bool = setting(False, "run steps on a GPU without CUDA graphs")
    batch_invariant: bool = setting(
        False, "bitwise equal logits whatever else is computed or cached; on a CPU, in bfloat16"
    )
    model_impl: str = setting(
        "auto", "decoder; auto: our own where the family is known", choices=("auto", "kvferry", "transformers")
    )
    lora: tuple[str, ...] = setting((), "adapter to load, as name=path of a directory in PEFT's layout; repeatable")
    max_loras: int = setting(8, "adapters that a node holds at most", min=1)
    max_lora_rank: int = setting(64, "largest rank of an adapter", min=1)
    respawned: bool = setting(False, "whether a supervisor restarts this process when it ends", hidden=True)
    pools_apart: bool = setting(False, "have ranks on a CPU keep pools of their own, as on GPUs", hidden=True)
    cores_fd: int = setting(
        -1, "descriptor of the memory shared with processes on the same cores (engine/shared_cores)", hidden=True
    )
    weights_fd: int = setting(-1, "descriptor of the shared copy of the weights (runtime/shared_file.py)", hidden=True)
    verify_checksums: float = setting(1.0, "share of shipped blocks whose checksum is verified, 0 to 1", min=0, max=1)
    canary_rate: float = setting(
        0.0,
        "share of the shipped prompts that an idle decode node recomputes for comparison, 0 to 1; 0: none",
        min=0,
        max=1,
    )
    ucx_transports: str = setting("", "UCX_TLS for the link; default: tcp,posix,self and what the device adds")
    ucx_net_devices: str = setting("", "UCX_NET_DEVICES of the link; default: lo, an advertised tunnel or UCX's choice")
    grant_timeout: float = setting(30.0, "seconds a prefill waits for a grant", min=0)


@dataclass(frozen=True, kw_only=True)
class ServeSettings(RouterSettings, WorkerSettings, LocalSettings):
    """Settings of `kvferry serve`, a whole local cluster; children receive the router and worker settings."""

    model: tuple[str, ...] = setting((DEMO,), MODELS)  # type: ignore[assignment]
    port: int = setting(8000, "HTTP port of the router", min=0, max=65535)
    prefill: int = setting(1, "prefill processes of each model; 0: decode nodes prefill locally", min=0)
    decode: int = setting(1, "decode processes per model", min=1)
    encode: int = setting(
        0, "processes per model that encode images and audio; 0: the nodes that compute prompts do", min=0
    )
    share_weights: bool = setting(True, "one copy of a model's weights for all of its workers on a CPU")
    queue_timeout: float = setting(15.0, QUEUE_TIMEOUT, min=0)
    redis_url: str = setting("", "Redis or Valkey to use; empty: start an embedded Valkey server")
