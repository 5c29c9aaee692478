"""SGLang's `/pd_role_switch` for its mock: status, answer and order of its checks as in SGLang's sources."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse


class Switching(Protocol):
    """How a mock switches. switch: on; off (started without the flag); absent (an old release); full (no memory for
    graphs); breaks (the change fails half way); hangs (the next change is done, but its answer comes late); lies
    (says that it changed)."""

    mode: str
    switch: str


LATE_S = 3.0
"""Seconds until the answer of a mock that hangs."""


class RoleSwitch:
    """Changes of one mock's mode. running: returns its number of requests. switched: modes that it took."""

    def __init__(self, behaviour: Switching, running: Callable[[], int]) -> None:
        self._behaviour, self._running = behaviour, running
        self.switched, self.asked, self.broken = list[str](), list[dict[str, Any]](), False

    def mount(self, app: FastAPI) -> None:
        app.post("/pd_role_switch")(self.post)

    async def post(self, request: Request) -> JSONResponse:
        if self._behaviour.switch == "absent":
            return JSONResponse({"detail": "Not Found"}, 404)
        body = await request.json()
        self.asked.append(body)
        old, new = self._behaviour.mode, body["new_role"]
        if (why := self._refusal(old, new)) is None and new != old and self._behaviour.switch != "lies":
            self._behaviour.mode = new
            self.switched.append(new)
            if self._behaviour.switch == "hangs":
                self._behaviour.switch = "on"
                await asyncio.sleep(LATE_S)
        told = {"success": why is None, "message": why or "ok", "old_role": old, "new_role": new,
                "safe_to_restore": why is not None and not self.broken}  # fmt: skip
        return JSONResponse(told, 200 if why is None else 400)

    def _refusal(self, old: str, new: str) -> str | None:
        if self._behaviour.switch == "off":
            return "--enable-pd-role-switch is not set on this instance"
        if self.broken:
            return "instance is unhealthy after a failed role switch; restart required"
        if old == "null":
            return "instance is not running in PD disaggregation mode"
        if new == old:
            return None
        if self._running():
            return "instance is not idle; drain all requests before switching"
        if self._behaviour.switch == "full" and new == "decode":
            return "insufficient decode CUDA graph headroom: required=4.000 GB, available=1.000 GB"
        if self._behaviour.switch == "breaks":
            self.broken = True
            return "role switch failed; instance unhealthy, restart required: boom"
        return None
