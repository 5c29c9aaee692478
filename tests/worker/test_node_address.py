"""A node's name and URL."""

from __future__ import annotations

import pytest

from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker.node_address import NodeAddress


def address(**settings: object) -> NodeAddress:
    return NodeAddress(WorkerSettings(role="decode", **settings), lambda: (200, {}), lambda: "")  # type: ignore[arg-type]


def test_what_others_dial_is_advertised() -> None:
    made = address(host="0.0.0.0", advertise_host="fd00::7", node_id="d")
    assert made.url.startswith("http://[fd00::7]:")
    assert made.node_id == "d"
    assert address(host="127.0.0.1").node_id.startswith("decode-")


def test_an_address_that_names_no_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="--advertise-host"):
        address(host="0.0.0.0")
