"""Settings that all processes share: model names, Redis, cluster, secret, host, TLS and logs."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.setting import setting


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """Base of every process's settings."""

    served_model_name: tuple[str, ...] = setting(
        (), "names of the model in requests, repeated or separated by commas; default: derived from --model"
    )
    redis_url: str = setting(
        "redis://127.0.0.1:6379/0",
        "Redis or Valkey that holds the node registry and block index: redis://, rediss:// (TLS), unix:// or "
        "redis+sentinel://host:port,host:port/service; pass a password by the environment variable, which other "
        "users cannot see",
    )
    redis_password_file: str = setting("", "file with the password of Redis, read at each connection")
    cluster: str = setting("default", "name of the cluster; keeps clusters apart that share one Redis")
    elastic: bool = setting(False, "let idle nodes change between prefill and decode with the load of the two pools")
    cluster_secret: str = setting(
        "",
        "secret that all processes of a cluster share; pass it by a file or the environment variable, which "
        "other users cannot see",
    )
    cluster_secret_file: str = setting(
        "",
        "file with the cluster secret, at least 16 characters, or several, one per line: the first is used, all are "
        "accepted; reloaded when it changes",
    )
    host: str = setting("127.0.0.1", "address to listen on")
    ssl_keyfile: str = setting("", "PEM file with the private key of --ssl-certfile; default: read from that file")
    ssl_certfile: str = setting("", "PEM file with this server's certificate and chain; turns TLS on")
    ssl_ca_certs: str = setting("", "PEM file of certificate authorities that must have signed clients' certificates")
    log_level: str = setting("info", "log level", choices=("debug", "info", "warning", "error"))
    log_format: str = setting(
        "text", "log format: one line of text or one JSON object per record", choices=("text", "json")
    )
    status_fd: int = setting(-1, "file descriptor for reports of progress and readiness; -1: none", hidden=True)
