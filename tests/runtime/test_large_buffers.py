"""Large buffers are mapped by themselves: their memory goes back to the system, and they grow where they are."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

GROW = """
import io, pathlib, re
from kvferry.runtime.large_buffers import map_large_buffers

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])

map_large_buffers()
bytes(2**25)
before, between, most = resident(), [], 0
for _ in range(3):
    buffer = io.BytesIO()
    for _ in range(256):
        buffer.write(b"a" * 2**16)
        between.append(bytes(600))
        most = max(most, resident() - before)
    del buffer
print(most, resident() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_a_buffer_grows_in_place_and_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", GROW], capture_output=True, text=True, check=True, timeout=60)
    most, left = (int(each) / 1024 for each in done.stdout.split())
    assert most < 16 * 1.3, "MiB: a copy would take as much again"
    assert left < 4
