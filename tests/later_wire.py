"""Processes of the next wire version: `python -m later_wire FD` is a zygote in which all were imported as such."""

from __future__ import annotations

import os
import socket
import sys
from subprocess import Popen

from tests.chaos.zygote import IMPORT_S, TESTS, Zygote, serve


class LaterZygote(Zygote):
    """Its forks speak the wire version after this one."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = os.environ | {"PYTHONPATH": str(TESTS.parent), "OMP_WAIT_POLICY": "PASSIVE"}
        argv = [sys.executable, "-m", "tests.later_wire", str(theirs.fileno())]
        self._process = Popen(argv, pass_fds=(theirs.fileno(),), env=env)
        theirs.close()
        self._socket.settimeout(IMPORT_S)
        assert self._socket.recv(16) == b"imported", "the zygote did not start"


def later() -> None:
    """Before anything has taken the number from there."""
    from kvferry.protocol import layout

    taken = [name for name, module in sys.modules.items() if name != layout.__name__ and "WIRE_VERSION" in vars(module)]
    assert not taken, taken
    layout.WIRE_VERSION += 1


if __name__ == "__main__":
    later()
    serve(int(sys.argv[1]))
