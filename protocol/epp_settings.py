"""Settings of `kvferry epp`, the endpoint picker of a gateway."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.setting import setting
from kvferry.protocol.settings import RouterSettings


@dataclass(frozen=True, kw_only=True)
class EppSettings(RouterSettings):
    """Settings of `kvferry epp`: those of a router that concern placement, and the ports of an endpoint picker."""

    port: int = setting(9002, "gRPC port for Envoy's external processing; 0 lets the kernel choose", min=0, max=65535)
    health_port: int = setting(
        9003, "gRPC port for health checks, without TLS; 0 lets the kernel choose", min=0, max=65535
    )
    metrics_port: int = setting(
        9090, "HTTP port of /metrics, /health and /ready, without TLS; 0 lets the kernel choose", min=0, max=65535
    )
    fallback_endpoints: int = setting(
        1, "further endpoints named for each request, which the gateway tries if the first fails", min=0, max=16
    )
    drain_delay: float = setting(
        5.0, "seconds after SIGTERM in which new requests are still accepted, while gateways learn of it", min=0
    )


NOT_FOR_EPP = (
    "workers", "worker", "workers_dir", "elastic", "pooling", "share_prefixes", "allowed_origins", "allowed_methods",
    "allowed_headers", "allow_credentials", "root_path", "tool_call_parser", "reasoning_parser", "generation_config",
    "allow_lora_updates", "header_timeout", "min_body_rate", "reader_timeout", "max_connections_per_address",
    "elastic_rest", "response_ttl", "response_store_mib", "data_dir", "files_store", "files_ttl", "files_mib",
    "batch_rows", "buddies", "fetch", "local_prefill_tokens",
)  # fmt: skip
"""Settings of a router that an endpoint picker does not have, since Envoy carries the bytes."""
