"""Options of UCX contexts."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from kv_transfer.ucx_library import context_options, load
from protocol.errors import ConfigError


def test_with_cuda_only_the_receiver_touches_its_blocks() -> None:
    options = context_options("10.0.0.1", cuda=True)
    assert options["RNDV_SCHEME"] == "get_zcopy"
    assert options["TLS"] == "tcp,posix,self,cuda_copy,cuda_ipc"
    assert "RNDV_SCHEME" not in context_options("10.0.0.1")


def test_a_machine_without_ucx_is_told_the_package_of_its_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def absent(name: str, *given: Any) -> Any:
        if name == "ucxx":
            raise ImportError("No module named 'ucxx'")
        return imported(name, *given)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigError, match=r"pip install ucxx-cu13 .*CUDA 12: ucxx-cu12"):
        load()
