"""Memory that one process writes and all read."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from kvferry.runtime.shared_file import SharedFile, make

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="not Linux")

DIES = """
import os, signal, sys
from kvferry.runtime.shared_file import SharedFile
memory = SharedFile(int(sys.argv[1]))
assert memory.take_turn()
os.write(memory.writing, b"half")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = make()
    yield made
    os.close(made)


def test_what_is_sealed_is_read_by_all_and_written_by_nobody(descriptor: int) -> None:
    first, second = SharedFile(descriptor), SharedFile(descriptor)
    assert first.take_turn()
    os.write(first.writing, b"whole")
    assert not second.whole
    first.seal()
    assert not second.take_turn()
    reader = second.reader()
    assert os.read(reader, 9) == b"whole"
    for each in (descriptor, first.writing):
        with pytest.raises(PermissionError):
            os.pwrite(each, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(each, 0)
    os.close(reader)
    first.close()
    second.close()
    assert os.pread(descriptor, 9, 0) == b"whole"


def test_others_wait_for_a_writer_as_long_as_it_comes_further(descriptor: int) -> None:
    first, second = SharedFile(descriptor), SharedFile(descriptor)
    assert first.take_turn()

    def write() -> None:
        for _ in range(10):
            time.sleep(0.2)
            os.write(first.writing, b"piece")
        first.seal()

    writer = threading.Thread(target=write)
    writer.start()
    assert not second.take_turn(stalled_s=1.0)
    writer.join()
    first.close()
    second.close()


def test_a_writer_that_hangs_is_not_waited_for(descriptor: int) -> None:
    first, second = SharedFile(descriptor), SharedFile(descriptor)
    assert first.take_turn()
    with pytest.raises(TimeoutError, match="no progress"):
        second.take_turn(stalled_s=0.2)
    os.write(first.writing, b"whole")
    second.close()
    first.seal()
    first.close()
    assert os.pread(descriptor, 9, 0) == b"whole"


def test_one_that_gives_up_leaves_nothing(descriptor: int) -> None:
    first, second = SharedFile(descriptor), SharedFile(descriptor)
    assert first.take_turn()
    os.write(first.writing, b"half")
    first.close()
    assert second.take_turn()
    assert second.size == 0
    second.close()


def test_after_a_writer_that_was_killed_the_next_begins_anew(descriptor: int) -> None:
    died = subprocess.run([sys.executable, "-c", DIES, str(descriptor)], pass_fds=[descriptor], timeout=60)
    assert died.returncode < 0
    memory = SharedFile(descriptor)
    assert memory.size == 4
    assert not memory.whole
    assert memory.take_turn()
    assert memory.size == 0
    memory.close()


def test_a_descriptor_that_is_not_open_is_an_error(descriptor: int) -> None:
    with pytest.raises(OSError, match="No such file"):
        SharedFile(1 << 20)
