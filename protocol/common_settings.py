"""Settings that router and worker processes share."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.setting import setting


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """Base of every process's settings."""

    served_model_name: tuple[str, ...] = setting(
        (), "names clients use for the model, repeated or with commas; default: derived from --model"
    )
    redis_url: str = setting(
        "redis://127.0.0.1:6379/0",
        "Redis or Valkey that holds the node registry and block index: redis://, rediss:// (TLS), unix:// or "
        "redis+sentinel://host:port,host:port/service; in the variable others do not see a password in it",
    )
    redis_password_file: str = setting("", "file with the password of Redis, read again at each connection")
    cluster: str = setting("default", "name that separates clusters sharing one Redis")
    elastic: bool = setting(False, "let idle nodes change their role when the load of both pools asks for it")
    cluster_secret: str = setting(
        "", "what the processes of a cluster prove to each other; in a file or the variable others do not see it"
    )
    cluster_secret_file: str = setting(
        "",
        "file with the cluster secret, 16 characters or more; of several, one a line, the first is used and all are "
        "accepted. It is read again when it changes",
    )
    host: str = setting("127.0.0.1", "address to listen on")
    log_level: str = setting("info", "how much to log", choices=("debug", "info", "warning", "error"))
    log_format: str = setting("text", "a line per record: of text, or an object of JSON", choices=("text", "json"))
    status_fd: int = setting(-1, "descriptor on which to report loading and readiness; -1: none", hidden=True)
