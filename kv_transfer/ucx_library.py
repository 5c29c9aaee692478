"""UCX set-up: the only module that imports ucxx, and the options of each context.

Options go into the context, not into the process environment, so an operator's own UCX_* variables stay visible to UCX
for everything that is not set here. Only what UCX reads while it is loaded is set as variables, in `load`, unless the
operator set them: its warnings about variables that ucxx itself sets, and ucxx's error lines for every peer that goes
away, which the link reports itself.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from kvferry.protocol.errors import ConfigError
from kvferry.runtime.address import is_loopback

HOST_TRANSPORTS = "tcp,posix,self"
CUDA_TRANSPORTS = "cuda_copy,cuda_ipc"
INSTALLED_BY = "install it with: pip install ucxx-cu13 (beside a torch that is built for CUDA 12: ucxx-cu12)"


@dataclass(frozen=True, slots=True)
class UcxLibrary:
    """ucxx's low-level module, its buffer class and its version."""

    api: Any
    array: Any
    version: str


def load() -> UcxLibrary:
    """Import ucxx. Raises ConfigError with the remedy where it is missing or broken."""
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ.setdefault("UCXX_LOG_LEVEL", "FATAL")
    try:
        import ucxx
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array
    except (ImportError, OSError) as error:
        raise ConfigError(f"UCX cannot be loaded ({error}); {INSTALLED_BY}") from error
    return UcxLibrary(libucxx, Array, ".".join(map(str, ucxx.get_ucx_version())))


def context_options(host: str, transports: str = "", net_devices: str = "", cuda: bool = False) -> dict[str, str]:
    """UCX options without their UCX_ prefix.

    transports and net_devices are UCX_TLS and UCX_NET_DEVICES. Empty: tcp and shared memory, with cuda also the CUDA
    lanes; `lo` for a loopback host, else UCX's own choice. A host that is an IPv6 address is reached over IPv6, also
    where there are others. posix gets error handling because endpoints that ask for it have tcp only otherwise; the
    link itself notices when a process ends, so UCX need not wake for it (KEEPALIVE). The tcp segment sizes raise a
    loopback stream from 1.5 to 5 GB/s. With cuda the rendezvous scheme is UCX's own choice: between two processes on
    one H100 it moves blocks over cuda_ipc at 100 GB/s, and get_zcopy through host memory at 0.8 (UCX 1.21).
    """
    chosen = transports or ",".join([HOST_TRANSPORTS, CUDA_TRANSPORTS] if cuda else [HOST_TRANSPORTS])
    names = chosen.split(",")
    if not chosen.startswith("^") and not {"tcp", "all"} & set(names):
        raise ConfigError(
            f"ucx_transports must contain tcp, which listeners need (got {chosen!r})", param="ucx_transports"
        )
    options = {"TLS": chosen, "KEEPALIVE_INTERVAL": "inf", "POSIX_ERROR_HANDLING": "y"}
    options |= {"TCP_TX_SEG_SIZE": "256k", "TCP_RX_SEG_SIZE": "512k"}
    if ":" in host:
        options["TCP_AF_PRIO"] = "inet6,inet"
    devices = net_devices or ("lo" if is_loopback(host) else "")
    return options | ({"NET_DEVICES": devices} if devices else {})
