"""Decoding of media's base64 in slices, so that no call holds the interpreter lock for long."""

from __future__ import annotations

import binascii
from collections.abc import Iterator

from pydantic_core import SchemaValidator, core_schema

SLICE = 2**16
"""Characters decoded at once, which takes 0.1 ms; a multiple of 4."""
_DECODER = SchemaValidator(core_schema.bytes_schema(), core_schema.CoreConfig(val_json_bytes="base64"))
"""Decoder of JSON texts, three times as fast as the standard library's.

It also takes the alphabet of URLs, and characters that JSON escapes; see `decoded_slices`."""


def decoded_slices(text: str, begin: int = 0) -> Iterator[bytes]:
    """Yield the bytes of the base64 after the first `begin` characters. Raises ValueError where it is damaged.

    It takes what the standard library's strict mode takes."""
    size = len(text) - begin
    if not size or size % 4:
        raise ValueError("the text is cut off")
    _decoded(text[-4:], may_end=True)  # a text that was cut off is refused before the rest is decoded
    for start in range(begin, len(text), SLICE):
        yield _decoded(text[start : start + SLICE], may_end=start + SLICE >= len(text))


def _decoded(text: str, *, may_end: bool) -> bytes:
    """Decode a slice. may_end: it is the last one, which may end with padding."""
    rest, padding = b"", text.find("=")
    if 0 <= padding < len(text) - 2 * may_end or "-" in text or "_" in text:
        raise ValueError("the text is not base64")
    if padding >= 0:  # whose last bits many encoders leave as they are
        text, rest = text[:-4], binascii.a2b_base64(text[-4:], strict_mode=True)
    data: bytes = _DECODER.validate_json(f'"{text}"')
    if len(data) != len(text) * 3 // 4:
        raise ValueError("the text holds an escaped character")
    return data + rest if rest else data
