"""Options of UCX contexts."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from kvferry.kv_transfer.ucx_library import context_options, load
from kvferry.protocol.errors import ConfigError


def test_with_cuda_ucx_chooses_how_blocks_meet() -> None:
    """A scheme that is set keeps blocks off cuda_ipc: a hundred times slower on an H100."""
    options = context_options("10.0.0.1", cuda=True)
    assert options["TLS"] == "tcp,posix,self,cuda_copy,cuda_ipc"
    assert not {"RNDV_SCHEME", "RNDV_THRESH"} & set(options)


def test_a_machine_without_ucx_is_told_the_package_of_its_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def absent(name: str, *given: Any) -> Any:
        if name == "ucxx":
            raise ImportError("No module named 'ucxx'")
        return imported(name, *given)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigError, match=r"pip install ucxx-cu13 .*CUDA 12: ucxx-cu12"):
        load()
