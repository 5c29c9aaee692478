"""Options of UCX contexts."""

from __future__ import annotations

import builtins
import socket
from collections import namedtuple
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvferry.kv_transfer import ucx_library
from kvferry.kv_transfer.ucx import UcxLink
from kvferry.kv_transfer.ucx_library import context_options, load
from kvferry.protocol.errors import ConfigError


def test_with_cuda_ucx_chooses_how_blocks_meet() -> None:
    """A scheme that is set keeps blocks off cuda_ipc: a hundred times slower on an H100."""
    options = context_options("10.0.0.1", gpu="cuda")
    assert options["TLS"] == "tcp,posix,self,cuda_copy,cuda_ipc"
    assert not {"RNDV_SCHEME", "RNDV_THRESH"} & set(options)


def test_lanes_of_amd_have_names_of_their_own() -> None:
    options = context_options("10.0.0.1", gpu="rocm")
    assert options["TLS"] == "tcp,posix,self,rocm_copy,rocm_ipc"
    assert "RNDV_SCHEME" not in options
    assert context_options("10.0.0.1", "tcp", gpu="rocm")["TLS"] == "tcp"


def test_a_machine_without_ucx_is_told_the_package_of_its_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def absent(name: str, *given: Any) -> Any:
        if name == "ucxx":
            raise ImportError("No module named 'ucxx'")
        return imported(name, *given)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigError, match=r"pip install ucxx-cu13 .*CUDA 12 or ROCm: ucxx-cu12"):
        load()


@pytest.mark.parametrize("built", [False, True])
def test_a_pool_on_amd_needs_ucx_built_with_rocm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, built: bool) -> None:
    """Without its module UCX copies a GPU's memory as if it were the host's."""
    (tmp_path / "ucx").mkdir()
    for name in ("libuct_cuda.so.0", *(["libuct_rocm.so.0"] if built else [])):
        (tmp_path / "ucx" / name).touch()
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f01 r-xp 00000000 fe:00 12  {tmp_path}/libuct.so.0.0.0\n7f02-7f03 rw-p 00000000 00:00 0\n")
    monkeypatch.setattr(ucx_library, "MAPPED", maps)
    if built:
        ucx_library.require_rocm()
    else:
        with pytest.raises(ConfigError, match="ucx-rocm"):
            ucx_library.require_rocm()


def test_a_link_of_a_pool_on_amd_refuses_the_ucx_of_pypi() -> None:
    with pytest.raises(ConfigError, match="RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"):
        UcxLink("127.0.0.1", gpu="rocm")


Address = namedtuple("Address", ["family", "address"])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One with an Ethernet interface (type 1) and a WireGuard tunnel (type 65534)."""
    interfaces = {
        "eth0": (1, [Address(socket.AF_INET, "10.9.0.1"), Address(socket.AF_INET6, "fe80::1%eth0")]),
        "wg0": (65534, [Address(socket.AF_INET, "10.77.0.1"), Address(socket.AF_INET6, "fd77::1")]),
    }
    for name, (kind, _) in interfaces.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "type").write_text(f"{kind}\n")
    monkeypatch.setattr(ucx_library, "INTERFACES", tmp_path)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {name: found for name, (_, found) in interfaces.items()})
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("host", "devices"),
    [
        ("10.77.0.1", "wg0"),
        ("fd77::1", "wg0"),
        ("[fd77::1]", "wg0"),
        ("10.9.0.1", None),
        ("fe80::1", None),
        ("10.1.1.1", None),
        ("no-such-name.invalid", None),
        ("127.0.0.1", "lo"),
    ],
)
def test_blocks_stay_in_the_tunnel_whose_address_is_advertised(host: str, devices: str | None) -> None:
    """UCX chooses among all interfaces otherwise, and takes the faster one beneath the tunnel, in clear."""
    assert context_options(host).get("NET_DEVICES") == devices


@pytest.mark.usefixtures("machine")
def test_an_operator_s_devices_come_before_the_tunnel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert context_options("10.77.0.1", net_devices="eth0")["NET_DEVICES"] == "eth0"
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    assert "NET_DEVICES" not in context_options("10.77.0.1")
