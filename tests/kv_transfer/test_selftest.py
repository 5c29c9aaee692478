"""The self-test over the real UCX."""

from __future__ import annotations

import pytest

from kvferry.kv_transfer.selftest import self_test
from kvferry.protocol.errors import ConfigError
from tests.kv_transfer.link_processes import no_thread_left


@pytest.mark.parametrize("transports", ["", "tcp"])
def test_it_measures_a_transfer_and_leaves_no_thread(transports):
    with no_thread_left():
        result = self_test(transports, size_bytes=4 << 20)
    assert 10e6 < result.bytes_per_s < 1e12
    assert "4 MiB" in result.describe()


def test_an_unknown_device_is_a_config_error_that_lists_the_devices():
    with pytest.raises(ConfigError, match=r"lo"):
        self_test(net_devices="nosuch0")


def test_a_failure_names_what_to_try(monkeypatch):
    monkeypatch.setattr("kvferry.kv_transfer.selftest.LIMIT_S", 0.3)
    monkeypatch.setattr("kvferry.kv_transfer.selftest.UcxLink.send", lambda *args: None)
    with pytest.raises(ConfigError, match="--ucx-net-devices"):
        self_test(size_bytes=1 << 20)
