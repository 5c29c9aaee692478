"""A process that speaks UCX to a link's port without being a link: whatever a stranger may send."""

from __future__ import annotations

import random
import time

import numpy as np

from kv_transfer.tags import link_tag
from kv_transfer.ucx_frames import GREETING, HEADER
from kv_transfer.ucx_library import UcxLibrary, context_options, load
from kv_transfer.ucx_peer import CONTROL
from process.address import parse_host_port
from protocol.layout import WIRE_VERSION
from protocol.link_messages import Abort, Commit, Grant, GrantRequest
from protocol.messages import TokenDelta
from protocol.wire import pack

SETTLE_S = 0.02


class Stranger:
    """One connection to the address, driven by hand. `channel` is where it hears the link's frames."""

    def __init__(self, library: UcxLibrary, worker, address: str, channel: int):
        host, port = parse_host_port(address)
        self._library, self._worker, self.channel = library, worker, channel
        self._endpoint = worker.create_endpoint_from_hostname(host, port, True)
        self._requests: list[tuple] = []
        self._frame = np.zeros(8192, dtype=np.uint8)
        self._heard = self._endpoint.tag_recv(library.array(self._frame), self._tag(link_tag(channel, CONTROL)))

    def _tag(self, tag: int):
        return self._library.api.UCXXTag(tag)

    def progress(self, seconds: float = SETTLE_S) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._worker.progress()
            time.sleep(0.001)

    def active(self, data: bytes) -> None:
        self._keep(self._endpoint.am_send, data)

    def tagged(self, tag: int, data: bytes) -> None:
        self._keep(lambda array: self._endpoint.tag_send(array, self._tag(tag)), data)

    def _keep(self, send, data: bytes) -> None:
        try:
            self._requests.append((send(self._library.array(data)), data))
        except self._library.api.UCXError:
            """The link closed the connection, as it should."""

    def greeted(self, limit_s: float = 5.0) -> int:
        """Greet as a link does; the channel on which the link listens, 0 where it did not answer."""
        self.active(GREETING.pack(WIRE_VERSION, self.channel))
        until = time.monotonic() + limit_s
        while not self._heard.completed:
            if time.monotonic() > until:
                return 0
            self.progress()
        return GREETING.unpack_from(self._frame.tobytes(), HEADER.size)[1]

    def close(self) -> None:
        self.progress()
        self._endpoint.close_blocking()


def opened():
    """(library, worker) of a context of our own."""
    library = load()
    api = library.api
    context = api.UCXContext(context_options("127.0.0.1"), (api.Feature.TAG, api.Feature.AM, api.Feature.WAKEUP))
    return library, api.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)


def strange_process(pipe, address: str, seed: int) -> None:
    """Child. Commands: ("active", bytes): one active message on a connection of its own; ("frames", [bytes]): these
    after a proper greeting; ("fuzz", count): that many random messages over a few connections; ("stop",). Each but the
    last is answered."""
    library, worker = opened()
    draw = random.Random(seed)
    channel = 1
    pipe.send("started")
    while (command := pipe.recv())[0] != "stop":
        channel += 1
        stranger = Stranger(library, worker, address, channel)
        if command[0] == "active":
            stranger.active(command[1])
        elif command[0] == "frames":
            theirs = stranger.greeted()
            for frame in command[1]:
                stranger.tagged(link_tag(theirs, CONTROL), frame)
        else:
            _fuzz(stranger, draw, command[1])
        stranger.progress(0.1)
        stranger.close()
        pipe.send("done")


def _fuzz(stranger: Stranger, draw: random.Random, count: int) -> None:
    theirs = stranger.greeted() if draw.random() < 0.7 else 0
    for _ in range(count):
        data = draw.randbytes(draw.choice((0, 1, 7, 9, 10, 11, 100, 5000, 20_000)))
        if draw.random() < 0.2:
            stranger.active(data)
        elif draw.random() < 0.5:
            stranger.tagged(draw.getrandbits(64), data)
        else:
            stranger.tagged(link_tag(theirs or 1, CONTROL), _almost_a_frame(draw, data))


def _almost_a_frame(draw: random.Random, data: bytes) -> bytes:
    body = pack(draw.choice(_WRONG)) if draw.random() < 0.5 else data
    length = draw.choice((len(body), 0, 8000, 1 << 31))
    sequence = draw.choice((0, 0, 1, 7, 1 << 31))
    return HEADER.pack(draw.choice((0, 1, 2, 2, 2, 3, 255)), draw.choice((0, 1, 1)), sequence, length) + body


_DELTA = TokenDelta("r", 1, 0, (1,))
_WRONG = (
    [1, {"a": None}],
    "text",
    Grant(1, 0, 1 << 40, 0),
    Grant(-1, 0, 1, 1 << 30),
    Abort([1], b"x"),  # type: ignore[arg-type]
    Abort({}, 5),  # type: ignore[arg-type]
    Commit(1, 2, ("x", 1 << 70 - 8), _DELTA),  # type: ignore[arg-type]
    Commit(1, -3, (), None),  # type: ignore[arg-type]
    GrantRequest(1, 1, "f", "no job"),  # type: ignore[arg-type]
    GrantRequest(1, 1, "f", _DELTA),  # type: ignore[arg-type]
)
"""Messages that the codec takes and no field of which can be trusted."""
