"""Which connections reach a link's listener. ucxx listens on every address of the machine, so the kernel is asked to
let only segments for the wanted addresses through to that socket: for others the port is as if a firewall dropped them.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import logging
import os
import socket
import stat
import struct

log = logging.getLogger(__name__)
UNSPECIFIED = ("", "0.0.0.0", "::")
SO_ATTACH_FILTER = 26
INSTRUCTION = struct.Struct("HBBI")
"""Of a classic packet filter: code, steps if true, steps if false, operand."""
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
DESTINATION = 0xFFF00000 + 16
"""The destination in an IPv4 header, which a filter finds at this negative offset."""
WHOLE, NOTHING = 0xFFFFFFFF, 0


def confine(port: int, host: str) -> None:
    """Before any connection is accepted: let only those through who dial the host. Raises OSError for an unknown name;
    where the kernel refuses, the log says so."""
    addresses = addresses_of(host)
    if addresses is None:
        return
    if not addresses:
        log.warning("nobody can reach this link: UCX listens on IPv4 only, and %s has no such address", host)
    try:
        restrict(port, addresses)
    except OSError as error:
        log.warning("the link listens on all addresses of this machine, not on %s only: %s", host, error)


def addresses_of(host: str) -> set[str] | None:
    """IPv4 addresses of a host to listen on; None: all of the machine's. UCX's listener has no others, so the set of a
    host that has IPv6 addresses only is empty, and nobody gets through. Raises OSError for an unknown name."""
    if host in UNSPECIFIED:
        return None
    found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    return {str(entry[4][0]) for entry in found if entry[0] == socket.AF_INET}


def restrict(port: int, addresses: set[str]) -> None:
    """Let this process's listener on the port hear from those who dial one of the addresses only. Raises OSError."""
    program = _program(sorted(int(ipaddress.IPv4Address(address)) for address in addresses))
    code = ctypes.create_string_buffer(program)
    length = len(program) // INSTRUCTION.size
    with _listener(port) as listener:
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", length, ctypes.addressof(code)))


def _program(wanted: list[int]) -> bytes:
    """Accept a segment whose destination is among the wanted: jump over the refusal to the end."""
    count = len(wanted)
    tests = [(JUMP_IF_EQUAL, count - place, 0, address) for place, address in enumerate(wanted)]
    steps = [(LOAD_WORD, 0, 0, DESTINATION), *tests, (RETURN, 0, 0, NOTHING), (RETURN, 0, 0, WHOLE)]
    return b"".join(INSTRUCTION.pack(*step) for step in steps)


def _listener(port: int) -> socket.socket:
    """A copy of the descriptor of this process's TCP socket that listens on all addresses at the port."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                copy = socket.socket(fileno=os.dup(descriptor))
                if _listens(copy, port):
                    return copy
                copy.close()
    raise OSError(f"no listener on port {port} in this process")


def _listens(found: socket.socket, port: int) -> bool:
    accepts = found.family == socket.AF_INET and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return bool(accepts) and found.getsockname() == ("0.0.0.0", port)
