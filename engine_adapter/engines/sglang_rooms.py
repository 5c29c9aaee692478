"""Bootstrap rooms: ids by which an SGLang prefill server and decode server find each other for one prompt.

A room is a number with the address of the prefill server's bootstrap service. Both servers get the same one, each in a
request of its own. Anyone who names a used room may get the blocks of another prompt, so rooms are drawn here."""

from __future__ import annotations

import json
import secrets
from typing import Any

from kvferry.engine_adapter.engines.sglang_roles import current_mode
from kvferry.protocol.errors import ConfigError

MODES = ("prefill", "decode")
"""Values of --disaggregation-mode of a server that does only prefill or only decode."""
DEFAULT_PORT = 8998
"""Port of the bootstrap service of a server that does not report it."""
NO_DECODE_HOST = "2.2.2.2"
"""Host that SGLang takes for a decode server that is not there: the prompt is computed, and its blocks go nowhere."""
ROOM_BITS = 63
"""Bits of a room's number."""


class Rooms:
    """Rooms of one server. mode: of MODES; empty: the server does both."""

    def __init__(self, reported: dict[str, Any]) -> None:
        mode = current_mode(reported)
        self.mode = mode if mode in MODES else ""
        self._port = int(reported.get("disaggregation_bootstrap_port") or DEFAULT_PORT)

    def draw(self, host: str) -> str:
        """Return a new room of this server, as a reference for one call of each engine.

        host: address of the prefill server for the other one; empty: none fetches the blocks. Raises ConfigError."""
        if self.mode != "prefill":
            raise ConfigError("only a server with --disaggregation-mode prefill has rooms", param="role")
        return json.dumps(
            {
                "bootstrap_host": host or NO_DECODE_HOST,
                "bootstrap_port": self._port,
                "bootstrap_room": secrets.randbits(ROOM_BITS),
            },
            separators=(",", ":"),
        )
