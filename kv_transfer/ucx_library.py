"""Loads UCX, as the only module that imports ucxx, and chooses the options of each UCX context.

Options go into the context, not into the process environment, so an operator's UCX_* variables apply to everything that
is not set here. `load` sets variables only for what UCX reads while it is loaded, unless the operator set them. They
silence UCX's warnings about variables that ucxx itself sets, and ucxx's error lines for every lost peer, which the link
reports itself."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from kvferry.protocol.errors import ConfigError
from kvferry.runtime.address import is_loopback

HOST_TRANSPORTS = "tcp,posix,self"
GPU_TRANSPORTS = {"cuda": "cuda_copy,cuda_ipc", "rocm": "rocm_copy,rocm_ipc"}
"""UCX's lanes for memory of GPUs, by platform."""
INTERFACES, MAPPED = Path("/sys/class/net"), Path("/proc/self/maps")
TUNNEL_TYPE = 65534
"""The kernel's type of interfaces without a link layer (ARPHRD_NONE): WireGuard's and other tunnels."""
INSTALLED_BY = "install it with: pip install ucxx-cu13 (beside a torch that is built for CUDA 12 or ROCm: ucxx-cu12)"


@dataclass(frozen=True, slots=True)
class UcxLibrary:
    """ucxx's low-level module, its buffer class and its version."""

    api: Any
    array: Any
    version: str


def load() -> UcxLibrary:
    """Import ucxx. Raises ConfigError naming the remedy if it is missing or broken."""
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ.setdefault("UCXX_LOG_LEVEL", "FATAL")
    try:
        import ucxx
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array
    except (ImportError, OSError) as error:
        raise ConfigError(f"UCX cannot be loaded ({error}); {INSTALLED_BY}") from error
    return UcxLibrary(libucxx, Array, ".".join(map(str, ucxx.get_ucx_version())))


def require_rocm() -> None:
    """Raise ConfigError unless the loaded UCX is built with ROCm, which no build on PyPI is.

    Other builds cannot distinguish AMD's GPU memory from host memory."""
    if not has_module("rocm"):
        raise ConfigError(
            "the KV pool is on a GPU of AMD, and this UCX is not built with ROCm; install a UCX of the system with "
            "ucx-rocm (or one built --with-rocm) and set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true"
        )


def has_module(platform: str) -> bool:
    """Return whether the loaded UCX has a module for memory of this platform: cuda or rocm."""
    folders = {Path(found).parent for found in re.findall(r"/\S*/libuct(?:-\w+)?\.so\S*", MAPPED.read_text())}
    return any(any((folder / "ucx").glob(f"libuct_{platform}.so*")) for folder in folders)


def context_options(host: str, transports: str = "", net_devices: str = "", gpu: str = "") -> dict[str, str]:
    """Return UCX options, without their UCX_ prefix.

    transports and net_devices are UCX_TLS and UCX_NET_DEVICES. gpu is cuda, rocm or empty. Empty transports: tcp and
    shared memory, and the lanes of `gpu`. Empty net_devices: `lo` for a loopback host, the tunnel for a tunnel's
    address, which UCX would not choose itself, else UCX's own choice. An IPv6 host is reached over IPv6 even if the
    machine has other addresses. POSIX_ERROR_HANDLING is set because endpoints that ask for error
    handling otherwise get tcp only. KEEPALIVE_INTERVAL is infinite because the link itself notices when a process ends.
    The tcp segment sizes raise a loopback stream from 1.5 to 5 GB/s. On GPUs the rendezvous scheme is UCX's own
    choice: between two processes on one H100 it moves blocks over cuda_ipc at 100 GB/s, and get_zcopy moves them
    through host memory at 0.8 GB/s (UCX 1.21).

    Raises ConfigError if transports lack tcp."""
    chosen = transports or ",".join([HOST_TRANSPORTS, GPU_TRANSPORTS[gpu]] if gpu else [HOST_TRANSPORTS])
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
    if not devices and "UCX_NET_DEVICES" not in os.environ:
        devices = tunnel_of(host)
    return options | ({"NET_DEVICES": devices} if devices else {})


def tunnel_of(host: str) -> str:
    """Return the tunnel of this machine that has the address of a host; empty if none has it."""
    try:
        found = {item[4][0] for item in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        if found & {address.address.partition("%")[0] for address in addresses}:
            kind = INTERFACES / name / "type"
            return name if kind.exists() and int(kind.read_text()) == TUNNEL_TYPE else ""
    return ""
