"""A local user without rights: `python stranger.py < tries` takes the user `nobody`, tries all, and says what it got.

It runs as a program of its own, for its parent would have to become `nobody` too. Only the standard library."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

NOBODY = 65534


def tried(tries: dict[str, list[str]]) -> dict[str, Any]:
    """What `nobody` could do of it. tries: folders to walk, files to open, sockets to dial."""
    code = [sys.executable, str(Path(__file__).resolve())]
    done = subprocess.run(code, input=json.dumps(tries), capture_output=True, text=True, timeout=60, check=True)
    return dict(json.loads(done.stdout))


def _walk(folder: str) -> tuple[list[str], list[str]]:
    """All files that can be read, and all places that can be written, from the folder down."""
    read, written = [], []
    for place, folders, files in os.walk(folder):
        for each in [place, *(os.path.join(place, name) for name in (*folders, *files))]:
            if os.access(each, os.W_OK) and not os.path.islink(each):
                written.append(each)
        read += [path for name in files if _opens(path := os.path.join(place, name))]
    return read, written


def _opens(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError:
        return False
    return True


def _dials(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(2)
        try:
            sock.connect(path)
        except OSError:
            return False
    return True


def _try(tries: dict[str, list[str]]) -> dict[str, Any]:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    read, written = [], []
    for folder in tries.get("folders", ()):
        more = _walk(folder)
        read += more[0]
        written += more[1]
    files = [path for path in tries.get("files", ()) if _opens(path)]
    listed = [path for path in tries.get("lists", ()) if os.access(path, os.R_OK) and _lists(path)]
    dialled = [path for path in tries.get("sockets", ()) if _dials(path)]
    return {"uid": os.getuid(), "read": read + files, "written": written, "listed": listed, "dialled": dialled}


def _lists(path: str) -> bool:
    try:
        os.listdir(path)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    print(json.dumps(_try(json.load(sys.stdin))))
