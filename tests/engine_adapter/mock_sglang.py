"""A server that speaks SGLang's protocol with a toy in the place of the model, alone or as one half of a pair.

    python -m tests.engine_adapter.mock_sglang PORT '{"mode": "prefill"}'

Two halves meet in a room of the prefill server, which its port stands for. As in SGLang, nobody checks who comes: a
room that is used twice gives the first prompt's token to the second. `POST /mock` changes how it behaves and tells what
it saw."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from kvferry.runtime.disconnect import disconnected
from tests.engine_adapter.mock_role_switch import RoleSwitch

MIN_ID, IDS = 1000, 20_000
NO_DECODE_HOST = "2.2.2.2"
CHECK_S = 0.02
"""Seconds that a health check keeps the server busy."""
LATE_S = 20.0
"""Longest time for which a leg waits for the other one, in seconds: SGLang's is 300."""


@dataclasses.dataclass
class Behaviour:
    """mode: null, prefill or decode. switch: see `mock_role_switch`.

    prefill_s, step_s: seconds per prompt and output token. late_s: until the room's
    bootstrap answers. fault: "", fails (each leg is aborted), dies (in the room), hangs (the leg never ends), wrong
    (its first token is another one)."""

    mode: str = "null"
    prefill_s: float = 0.0
    step_s: float = 0.0
    late_s: float = 0.0
    fault: str = ""
    switch: str = "off"


def toy_token(tokens: list[int], params: dict[str, Any]) -> int:
    parts: list[object] = [tokens, params["sampling_seed"] if params["temperature"] > 0 else 0]
    return MIN_ID + int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") % IDS


class Server:
    """State of one mock. rooms: first tokens by room, of prompts that are computed; used: rooms that were met in."""

    def __init__(self, behaviour: Behaviour, port: int) -> None:
        self.behaviour, self.port, self.running, self.asked = behaviour, port, 0, list[dict[str, Any]]()
        self.rooms: dict[int, int] = {}
        self.fetched: dict[int, asyncio.Event] = {}
        self.checks = 0
        self.aborted: list[str] = []
        self.legs: dict[str, asyncio.Event] = {}
        self.dangers: list[str] = []

    async def leg(self, body: dict[str, Any], work: Any) -> Any:
        """Run a leg until it ends or is aborted; None: it was aborted."""
        gone = self.legs.setdefault(body["rid"], asyncio.Event())
        self.running += 1
        tasks = asyncio.create_task(work), asyncio.create_task(gone.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return tasks[0].result() if tasks[0].done() else None
        finally:
            self.running -= 1
            self.legs.pop(body["rid"], None)
            for task in tasks:
                task.cancel()

    async def prefill(self, body: dict[str, Any]) -> int:
        """Compute a prompt; return its token once a decode server has fetched the blocks."""
        room, tokens = body["bootstrap_room"], body["input_ids"]
        await asyncio.sleep(self.behaviour.prefill_s * len(tokens))
        token = toy_token(tokens, body["sampling_params"])
        if body["bootstrap_host"] == NO_DECODE_HOST:
            return token
        await self.misbehave()
        if room in self.rooms:
            self.dangers.append("a room was used twice")
        self.rooms.setdefault(room, token)
        async with asyncio.timeout(LATE_S):
            await self.fetched.setdefault(room, asyncio.Event()).wait()
        return token + 1 if self.behaviour.fault == "wrong" else token

    async def misbehave(self) -> None:
        if self.behaviour.fault == "dies":
            os._exit(9)
        while self.behaviour.fault == "hangs":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        if self.behaviour.fault == "fails":
            raise TimeoutError

    async def fetch(self, body: dict[str, Any]) -> int:
        """Fetch the blocks of a room; return the first token, which comes with them."""
        await asyncio.sleep(self.behaviour.late_s)
        await self.misbehave()
        url = f"http://{body['bootstrap_host']}:{body['bootstrap_port']}/mock/rooms/{body['bootstrap_room']}"
        async with asyncio.timeout(LATE_S), httpx.AsyncClient() as client:
            while (told := (await client.get(url)).json()) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return int(told)


def meta(count: int, reason: dict[str, Any] | None) -> dict[str, Any]:
    return {"completion_tokens": count, "finish_reason": reason, "cached_tokens": 0, "prompt_tokens": 1}


def app_of(server: Server) -> FastAPI:
    app, behaviour, began = FastAPI(), server.behaviour, time.time()
    launched = behaviour.mode
    roles = RoleSwitch(behaviour, lambda: server.running + server.checks)
    roles.mount(app)

    @app.get("/health")
    async def health() -> Response:
        """As in SGLang, a check is a short request of its own."""
        server.checks += 1
        await asyncio.sleep(CHECK_S)
        server.checks -= 1
        return Response()

    @app.get("/server_info")
    async def info() -> dict[str, Any]:
        return {
            "version": "0.5.23", "model_path": "/models/toy", "page_size": 16, "max_total_num_tokens": 65536,
            "context_length": 4096, "disaggregation_mode": launched, "disaggregation_bootstrap_port": server.port,
            "internal_states": [{"disaggregation_mode": behaviour.mode}],
        }  # fmt: skip

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": "toy", "max_model_len": 4096}]}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(f"process_start_time_seconds {began}\nsglang:num_running_reqs {server.running}.0\n")

    @app.get("/mock/rooms/{room}")
    async def room(room: int) -> int | None:
        if room not in server.rooms:
            return None
        server.fetched.setdefault(room, asyncio.Event()).set()
        return server.rooms[room]

    @app.post("/mock")
    async def change(request: Request) -> dict[str, Any]:
        for name, value in (await request.json()).items():
            setattr(behaviour, name, value)
        return {"asked": server.asked, "aborted": server.aborted, "running": server.running, "dangers": server.dangers,
                "mode": behaviour.mode, "switched": roles.switched}  # fmt: skip

    @app.post("/abort_request")
    async def abort(request: Request) -> Response:
        rid = (await request.json())["rid"]
        server.aborted.append(rid)
        if rid in server.legs:
            server.legs[rid].set()
        return Response()

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        body = await request.json()
        if behaviour.mode != "null" and "bootstrap_room" not in body:
            message = "Disaggregated request received without bootstrap room id"
            return JSONResponse({"error": {"message": message, "code": 400}}, 400)
        server.asked.append(body)
        if body["stream"]:
            return StreamingResponse(stream(body), media_type="text/event-stream")
        leaving = asyncio.create_task(disconnected(request.receive))
        leaving.add_done_callback(lambda _: server.legs.get(body["rid"], asyncio.Event()).set())
        try:
            token = await server.leg(body, server.prefill(body))
        except TimeoutError:
            token = None
        finally:
            leaving.cancel()
        if token is None:
            return JSONResponse({"output_ids": [], "meta_info": meta(0, {"type": "abort", "message": "no peer"})})
        return JSONResponse({"output_ids": [token], "meta_info": meta(1, {"type": "length", "length": 0})})

    async def stream(body: dict[str, Any]) -> AsyncIterator[str]:
        params, tokens = body["sampling_params"], list(body["input_ids"])
        start, token = len(tokens), None
        try:
            if behaviour.mode == "decode" and (token := await server.leg(body, server.fetch(body))) is None:
                raise TimeoutError
        except (TimeoutError, httpx.TransportError):
            yield f"data: {json.dumps({'output_ids': [], 'meta_info': meta(0, {'type': 'abort', 'message': 'x'})})}\n\n"
            return
        server.running += 1
        try:
            while True:
                tokens.append(toy_token(tokens, params) if token is None else token)
                token, own = None, tokens[start:]
                ends = own[-1] in params["stop_token_ids"]
                last = len(own) == params["max_new_tokens"]
                reason = {"type": "stop" if ends else "length"} if ends or last else None
                yield f"data: {json.dumps({'output_ids': own, 'meta_info': meta(len(own), reason)})}\n\n"
                if reason:
                    break
                await asyncio.sleep(behaviour.step_s)
            yield "data: [DONE]\n\n"
        finally:
            server.running -= 1

    return app


def main() -> None:
    port = int(sys.argv[1])
    server = Server(Behaviour(**json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}), port)
    uvicorn.run(app_of(server), host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
