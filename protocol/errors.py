"""Error hierarchy with HTTP statuses and codes; exceptions of libraries are translated into it where they occur.

KvferryError                 500 server_error
├─ ConfigError               the process cannot start as configured; the command exits with status 2
├─ ModelFailed               500 model_failed (its logits are no numbers: the same on every node)
├─ GrammarFailed             500 grammar_failed (of grammar and tokens alone: the same on every node)
├─ ReplayDiffers             500 replay_differs (an engine that is not deterministic cannot continue the stream)
├─ FatalRequest              500 fatal_request (processes of nodes ended while they worked on it)
├─ InvalidRequest            400 invalid_request_error (names the field)
│  ├─ ContextLengthExceeded  400 context_length_exceeded
│  ├─ ModelNotFound          404 model_not_found
│  ├─ Unauthorized           401 invalid_api_key
│  ├─ NotFound               404 not_found
│  ├─ SlowRequest            408 request_timeout (header or body did not arrive in time)
│  ├─ RequestTooLarge        413 request_too_large
│  ├─ UnsupportedMedia       415 unsupported_media_type (a compressed body)
│  └─ HeaderTooLong          431 header_too_long
├─ RoleChangeRefused         409 role_kept (a node that was to change its role must not, or not now)
├─ Retryable                 503 unavailable: another attempt can help
│  ├─ Overloaded             429 overloaded (carries retry_after seconds)
│  ├─ NoNodes                503 no_nodes
│  ├─ NodeLost               503 node_lost
│  │  ├─ NodeDown            503 node_lost (its process ended: its connections were reset)
│  │  └─ Fenced              503 fenced (another process has its place: another epoch)
│  ├─ StreamLost             503 stream_gone (the node no longer keeps the frames that the router misses)
│  ├─ StepFailed             503 step_failed (this request, on this node; it is well otherwise)
│  ├─ TransferFailed         503 transfer_failed
│  │  └─ BlocksCorrupt       503 blocks_corrupt (other bytes arrived than were sent)
│  ├─ GrantRefused           503 grant_refused
│  ├─ AdapterNotLoaded       503 adapter_not_loaded (on this node, or not any more)
│  ├─ RegistryUnavailable    503 registry_unavailable (Redis: nodes and block index)
│  │  ├─ RegistryFull        503 registry_full (Redis has no memory for what was to be written)
│  │  └─ RegistryRefuses     503 registry_refuses (Redis does not let us in, or forbids what we do: it may be mended)
│  ├─ Draining               503 draining
│  └─ Moved                  503 moved (of an attempt: a later one continues it at another node)
├─ Incompatible              503 incompatible (fingerprints differ: the pair never works)
│  └─ OtherCluster           403 other_cluster (no cluster secret was shown, or another one)
├─ DeadlineExceeded          504 deadline_exceeded
└─ Cancelled                 499 cancelled (the client disconnected)
"""

from __future__ import annotations

from typing import Any

LONGEST = 2000
"""Maximum length of a message, in characters; a message may quote a client's input of any length."""


class KvferryError(Exception):
    """Base class of all errors.

    `status` is the HTTP status, `code` the stable name on the wire. `retryable`: a request that a node answered with
    this error may be tried again on the same node or another one. Cancelled is retryable: a node reports it for an
    attempt that it dropped, only a router for a request."""

    status = 500
    code = "server_error"
    type = "server_error"
    retryable = True

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None):
        if len(message) > LONGEST:
            message = message[: LONGEST - 1] + "…"
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """Return the error object of the OpenAI API: `{"error": {message, type, param, code}}`."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class ConfigError(KvferryError):
    code, retryable = "config_error", False


class ModelFailed(KvferryError):
    code, retryable = "model_failed", False


class GrammarFailed(KvferryError):
    code, retryable = "grammar_failed", False


class ReplayDiffers(KvferryError):
    code, retryable = "replay_differs", False


class FatalRequest(KvferryError):
    code, retryable = "fatal_request", False


class InvalidRequest(KvferryError):
    status, code, type, retryable = 400, "invalid_request_error", "invalid_request_error", False


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"
    counted: tuple[int, int, int] | None = None  # tokens of the prompt, the output and the context, where known


class ModelNotFound(InvalidRequest):
    status, code = 404, "model_not_found"


class Unauthorized(InvalidRequest):
    status, code = 401, "invalid_api_key"


class NotFound(InvalidRequest):
    status, code = 404, "not_found"


class SlowRequest(InvalidRequest):
    status, code = 408, "request_timeout"


class RequestTooLarge(InvalidRequest):
    status, code = 413, "request_too_large"


class UnsupportedMedia(InvalidRequest):
    status, code = 415, "unsupported_media_type"


class HeaderTooLong(InvalidRequest):
    status, code = 431, "header_too_long"


class RoleChangeRefused(KvferryError):
    status, code, retryable = 409, "role_kept", False


class Retryable(KvferryError):
    status, code, retryable = 503, "unavailable", True


class Overloaded(Retryable):
    status, code, type = 429, "overloaded", "rate_limit_error"


class NoNodes(Retryable):
    code = "no_nodes"


class NodeLost(Retryable):
    code = "node_lost"


class NodeDown(NodeLost):
    """The node's process has ended: its connections are reset or refused."""


class Fenced(NodeLost):
    code = "fenced"


class StreamLost(Retryable):
    code = "stream_gone"


class StepFailed(Retryable):
    code = "step_failed"


class TransferFailed(Retryable):
    code = "transfer_failed"


class BlocksCorrupt(TransferFailed):
    code = "blocks_corrupt"


class GrantRefused(Retryable):
    code = "grant_refused"


class AdapterNotLoaded(Retryable):
    code = "adapter_not_loaded"


class RegistryUnavailable(Retryable):
    code = "registry_unavailable"


class RegistryFull(RegistryUnavailable):
    code = "registry_full"


class RegistryRefuses(RegistryUnavailable):
    code = "registry_refuses"


class Draining(Retryable):
    code = "draining"


class Moved(Retryable):
    """End of an attempt whose stream continues on another node as attempt `later`."""

    code = "moved"
    later = -1


class Incompatible(KvferryError):
    status, code = 503, "incompatible"


class OtherCluster(Incompatible):
    status, code = 403, "other_cluster"


class DeadlineExceeded(KvferryError):
    status, code, retryable = 504, "deadline_exceeded", False


class Cancelled(KvferryError):
    status, code = 499, "cancelled"


def _tree(cls: type[KvferryError]) -> dict[str, type[KvferryError]]:
    """Return the classes by code; a subclass without its own code is its parent on the wire."""
    found: dict[str, type[KvferryError]] = {}
    for sub in cls.__subclasses__():
        found.update(_tree(sub))
    return {**found, cls.code: cls}


def from_body(body: Any, fallback: str = "unreadable error") -> KvferryError:
    """Return the error that a peer's `body()` describes; an unknown code becomes KvferryError."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return KvferryError(fallback)
    cls = _tree(KvferryError).get(str(error.get("code")), KvferryError)
    param = error.get("param")
    return cls(str(error.get("message", fallback)), param=param if isinstance(param, str) else None)


def reason(error: BaseException) -> str:
    """Return an exception of another library in one line.

    It is the first line of its text, after its type unless an OSError's text suffices."""
    text = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, OSError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
