"""Checks that node leases read from the registry are well formed, since a faulty node may write anything."""

from __future__ import annotations

from dataclasses import fields
from math import isfinite
from operator import attrgetter
from typing import Any

from kvferry.protocol.adapters import AdapterName
from kvferry.protocol.labels import NODE_ROLES
from kvferry.protocol.lease import Load, NodeLease, Rates, Sent
from kvferry.protocol.messages import Pulse

_TEXTS = attrgetter("node_id", "http_url", "link_address", "fingerprint", "model", "engine", "engine_url")
_COUNTS = attrgetter(
    *("epoch", "max_model_len", "block_bytes", "state_blocks", "state_stride", "media_row_bytes", "window_pages")
)
_LOAD = attrgetter(*(field.name for field in fields(Load)))
_RATES = attrgetter(*(field.name for field in fields(Rates)))
_PULSE = attrgetter(*(field.name for field in fields(Pulse)))


def is_valid(lease: NodeLease) -> bool:
    """Return whether all fields have their types, numbers are finite and at least 0, and block_size is positive."""
    return (
        all(type(text) is str for text in _TEXTS(lease))
        and lease.role in NODE_ROLES
        and lease.state in ("ready", "draining")
        and all(map(_is_count, _COUNTS(lease)))
        and all(map(_is_names, (lease.served_names, lease.guarantees, lease.modalities)))
        and type(lease.adapters) is tuple
        and all(isinstance(each, AdapterName) and type(each.name) is type(each.id) is str for each in lease.adapters)
        and _is_count(lease.block_size)
        and lease.block_size > 0
        and isinstance(lease.load, Load)
        and all(map(_is_count, _LOAD(lease.load)))
        and isinstance(lease.rates, Rates)
        and all(map(_is_rate, _RATES(lease.rates)))
        and isinstance(lease.pulse, Pulse)
        and all(map(_is_rate, _PULSE(lease.pulse)))
        and type(lease.leaving) is type(lease.elastic) is bool
        and _is_rate(lease.role_s)
        and _is_rate(lease.pressure)
        and type(lease.sent) is tuple
        and all(map(_is_sent, lease.sent))
    )


def is_same(lease: NodeLease, other: NodeLease) -> bool:
    """Return whether both leases belong to the same process."""
    return (lease.node_id, lease.epoch) == (other.node_id, other.epoch)


def _is_sent(row: Any) -> bool:
    return (
        isinstance(row, Sent)
        and row.kind in ("copy", "move")
        and type(row.node_id) is str
        and _is_count(row.transfers)
        and _is_count(row.blocks)
        and _is_rate(row.bytes_per_s)
    )


def _is_names(value: Any) -> bool:
    return type(value) is tuple and all(type(name) is str for name in value)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_rate(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value) and value >= 0
