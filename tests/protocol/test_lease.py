"""Leases in the registry tell their wire version in a form that every version reads."""

from __future__ import annotations

import pytest

from kvferry.protocol import lease as lease_module
from kvferry.protocol.layout import WIRE_VERSION
from kvferry.protocol.lease import IncompatibleLease, sealed, unsealed
from kvferry.protocol.wire import WireError, pack
from tests.fake_workers import lease_of

LEASE = lease_of("d1", "decode")


def test_a_lease_comes_back_as_it_was() -> None:
    assert unsealed(sealed(LEASE)) == LEASE


def test_what_another_version_wrote_is_known_by_name_whatever_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "WIRE_VERSION", WIRE_VERSION + 1)
    later = sealed(LEASE)
    monkeypatch.undo()
    assert unsealed(later) == IncompatibleLease("d1", "decode", WIRE_VERSION + 1)
    assert unsealed(pack([99, "p1", "prefill", b"\xc1 no message of ours"])) == IncompatibleLease("p1", "prefill", 99)


def test_a_lease_without_its_version_is_an_older_one() -> None:
    assert unsealed(pack(LEASE)) == IncompatibleLease("d1", "decode", 4)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", pack(1), pack([]), pack([WIRE_VERSION, "d1", "decode"]), pack([True, "d1", "decode", b""]),
     pack([WIRE_VERSION, "d1", "decode", b""]), pack([WIRE_VERSION, "d1", "decode", pack(5)])],
)  # fmt: skip
def test_what_is_no_lease_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        unsealed(data)
