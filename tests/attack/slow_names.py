"""A name server that answers every question after ten seconds: `python slow_names.py ADDRESS PORT SECONDS`.

It answers a question for an address with the loopback address of its kind, and ends with its parent."""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import time
from typing import Any

ANSWERS = {1: socket.inet_aton("127.0.0.1"), 28: socket.inet_pton(socket.AF_INET6, "::1")}
"""Data of A and AAAA records."""


def answer(question: bytes) -> bytes:
    """The answer to one question (RFC 1035): one record, or none."""
    end = question.index(0, 12) + 5
    (kind,) = struct.unpack_from("!H", question, end - 4)
    data = ANSWERS.get(kind, b"")
    head = question[:2] + struct.pack("!HHHHH", 0x8180, 1, bool(data), 0, 0)
    record = struct.pack("!HHHIH", 0xC00C, kind, 1, 1, len(data)) + data if data else b""
    return head + question[12:end] + record


def _labels(question: bytes) -> list[str]:
    at, found = 12, list[str]()
    while length := question[at]:
        found.append(question[at + 1 : at + 1 + length].decode(errors="replace"))
        at += 1 + length
    return found


def serve(host: str, port: int, delay_s: float) -> None:
    """Answer until the parent is gone."""
    parent, waiting = os.getppid(), list[tuple[float, bytes, tuple[Any, ...]]]()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((host, port))
        while os.getppid() == parent:
            if select.select([sock], [], [], 0.1)[0]:
                question, asker = sock.recvfrom(1500)
                print("name server:", ".".join(_labels(question)), file=sys.stderr, flush=True)
                waiting.append((time.monotonic() + delay_s, question, asker))
            while waiting and waiting[0][0] <= time.monotonic():
                _, question, asker = waiting.pop(0)
                sock.sendto(answer(question), asker)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
