"""Samples at times of one's own choice into a running Prometheus, by its remote-write protocol."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

import httpx

Series = tuple[tuple[str, str], ...]
"""Labels by name, `__name__` among them, in order."""
STALE = struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000002))[0]
"""What Prometheus writes for a series whose target has gone."""
LITERAL = 65536


def series(name: str, **labels: str) -> Series:
    return tuple(sorted({"__name__": name, **labels}.items()))


def write(client: httpx.Client, base_url: str, at_s: float, samples: Mapping[Series, float]) -> None:
    """One sample of each series at this time, which may not be before the newest of the series."""
    request = b"".join(_field(1, _time_series(labels, value, at_s)) for labels, value in samples.items())
    headers = {"Content-Encoding": "snappy", "Content-Type": "application/x-protobuf"}
    answer = client.post(f"{base_url}/api/v1/write", content=_snappy(request), headers=headers)
    assert answer.status_code == 204, answer.text


def _time_series(labels: Series, value: float, at_s: float) -> bytes:
    pairs = b"".join(_field(1, _field(1, name.encode()) + _field(2, text.encode())) for name, text in labels)
    return pairs + _field(2, b"\x09" + struct.pack("<d", value) + b"\x10" + _varint(round(at_s * 1000)))


def _field(number: int, data: bytes) -> bytes:
    """Of a protobuf message, one that has a length."""
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _snappy(data: bytes) -> bytes:
    """A block in which nothing is compressed."""
    return _varint(len(data)) + b"".join(_literals(data))


def _literals(data: bytes) -> Iterable[bytes]:
    for begin in range(0, len(data), LITERAL):
        part = data[begin : begin + LITERAL]
        yield b"\xf4" + struct.pack("<H", len(part) - 1) + part
