"""Writing of multipart forms."""

from __future__ import annotations

import secrets
from collections.abc import Iterable


def form_data(fields: Iterable[tuple[str, str]], filename: str, file: bytes) -> tuple[bytes, str]:
    """Return the body of a form with these fields and a file named `file`, and its content type."""
    boundary = secrets.token_hex(16)
    parts = [f'--{boundary}\r\ncontent-disposition: form-data; name="{_quoted(name)}"\r\n\r\n{value}\r\n'
             for name, value in fields]  # fmt: skip
    parts.append(
        f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="{_quoted(filename)}"\r\n'
        "content-type: application/octet-stream\r\n\r\n"
    )
    body = b"".join(("".join(parts).encode(), file, f"\r\n--{boundary}--\r\n".encode()))
    return body, f"multipart/form-data; boundary={boundary}"


def _quoted(text: str) -> str:
    """Return a text for a header, as browsers write it."""
    return text.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
