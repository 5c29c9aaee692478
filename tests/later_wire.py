"""Processes of the next wire version: `python -m later_wire FD` is a zygote in which all were imported as such."""

from __future__ import annotations

import sys

from tests.chaos.zygote import Zygote, serve


class LaterZygote(Zygote):
    """Its forks speak the wire version after this one."""

    def __init__(self) -> None:
        super().__init__("tests.later_wire")


def later() -> None:
    """Before anything has taken the number from there."""
    from kvferry.protocol import layout

    taken = [name for name, module in sys.modules.items() if name != layout.__name__ and "WIRE_VERSION" in vars(module)]
    assert not taken, taken
    layout.WIRE_VERSION += 1


if __name__ == "__main__":
    later()
    serve(int(sys.argv[1]))
