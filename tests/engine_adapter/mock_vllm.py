"""A server that speaks vLLM's protocol with a toy in the place of the model, as a process that can be killed.

    python -m tests.engine_adapter.mock_vllm PORT '{"step_s": 0.01}'

A token depends on all tokens before it and, with a temperature, on seed and position, so a stream can be resumed; with
`noise: "call"` seeded noise depends on the number of tokens of the call, as vLLM's on a CPU. Penalties and grammars
look at the tokens of the call alone, as every engine's do. `POST /mock` changes how it behaves."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.background import BackgroundTask

from kvferry.runtime.disconnect import disconnected
from tests.engine_adapter.mock_behaviour import Behaviour
from tests.engine_adapter.mock_kv_events import MockKvEvents
from tests.engine_adapter.mock_media import media_of, mount_speech, render, seen_in
from tests.engine_adapter.mock_pooling import mount_pooling
from tests.engine_adapter.mock_tokenizer import banned, mount_tokenizer
from tests.engine_adapter.mock_transfer import MockTransfer
from tests.engine_adapter.model_cache import Media, ModelCache

MIN_ID, IDS = 1000, 20_000
"""First and number of the token ids that are drawn."""


class Toy:
    """The toy model with its prefix cache. It hears and sees the hashes of media."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour, self.running, self.asked = behaviour, 0, list[dict[str, Any]]()
        self.cache = ModelCache(behaviour.blocks, behaviour.block_size)
        self.aborted, self.rendered = 0, list[dict[str, Any]]()
        self.events: MockKvEvents | None = None

    def run(self, tokens: list[int], salt: str, media: list[Media]) -> int:
        """Cache the full blocks; return the tokens that were reused."""
        reused = self.cache.run(tokens, salt, media=media)
        if (events := self.cache.take()) and self.events is not None:
            self.events.publish(events)
        return reused

    def next_token(self, tokens: list[int], start: int, params: dict[str, Any], seen: list[object]) -> int:
        own = tokens[start:]
        parts: list[object] = [tokens, *seen]
        if params["temperature"] > 0:
            parts += [params["seed"], len(own) if self.behaviour.noise == "call" else len(tokens)]
        if params["frequency_penalty"] or params["presence_penalty"] or params.get("structured_outputs"):
            parts += [own]
        if self.behaviour.loose:
            parts += [self.running]
        never = banned(words, own) if (words := params.get("bad_words")) else ()
        while True:
            token = MIN_ID + int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") % IDS
            if token not in never:
                return token
            parts.append("banned")


async def read(chunks: AsyncIterator[str]) -> list[dict[str, Any]]:
    return [json.loads(chunk[6:]) async for chunk in chunks if chunk[6:10] != "[DON"]


def mount_media(app: FastAPI, behaviour: Behaviour, toy: Toy) -> None:
    @app.post("/v1/chat/completions/render")
    async def rendered(request: Request) -> Response:
        toy.rendered.append(await request.json())
        if behaviour.fault == "refuse":
            return JSONResponse({"error": {"message": "overloaded", "code": 503}}, 503)
        return render(toy.rendered[-1], behaviour.modalities)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        made = render(body, behaviour.modalities)
        if made.status_code != 200:
            return made
        prompt = json.loads(bytes(made.body))
        tokens, start = list(prompt["token_ids"]), len(prompt["token_ids"])
        params = {"temperature": body["temperature"], "frequency_penalty": 0, "presence_penalty": 0}
        seen = seen_in(prompt["features"])
        for _ in range(body["max_tokens"]):
            tokens.append(toy.next_token(tokens, start, params, seen))
        return JSONResponse({"choices": [{"index": 0, "token_ids": tokens[start:]}]})


def row(token: int, most: int) -> dict[str, Any]:
    top = [{"token_id": token + at, "logprob": -0.5 - at, "rank": at + 1} for at in range(max(most, 1))]
    return {"token_id": token, "logprob": -0.5, "rank": 1, "top_logprobs": top}


def app_of(behaviour: Behaviour, port: int = 0) -> FastAPI:
    app, toy, began = FastAPI(), Toy(behaviour), time.time()
    transfer = MockTransfer(port, behaviour.block_size, behaviour.kv_lease, behaviour.corrupt)
    transfer.mount(app)
    dead = False

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=503 if dead else 200)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": behaviour.version}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        base = {"id": "toy", "root": behaviour.model, "parent": None, "max_model_len": behaviour.max_model_len}
        return {"data": [base, *({"id": name, "root": name, "parent": "toy"} for name in behaviour.loras)]}

    @app.get("/kv_event_sources")
    async def sources() -> dict[str, Any]:
        if not behaviour.events:
            return {}
        toy.events = toy.events or MockKvEvents()
        return toy.events.kv_event_sources()

    @app.get("/metrics")
    async def metrics() -> Response:
        usage = min(1.0, (toy.running * 8 + transfer.pinned_blocks) / behaviour.blocks)
        nixl = "vllm:nixl_num_kv_expired_reqs_total 0.0\n" if behaviour.transfer else ""
        return Response(
            f"process_start_time_seconds {began}\n"
            f'vllm:num_requests_running{{engine="0",model_name="toy"}} {toy.running}.0\n'
            f'vllm:num_requests_waiting{{engine="0",model_name="toy"}} 0.0\n'
            f'vllm:kv_cache_usage_perc{{engine="0",model_name="toy"}} {usage}\n'
            f'vllm:cache_config_info{{block_size="{behaviour.block_size}",cache_dtype="auto",'
            f'num_gpu_blocks="{behaviour.blocks}"}} 1.0\n{nixl}'
        )

    @app.post("/mock")
    async def change(request: Request) -> dict[str, Any]:
        for name, value in (await request.json()).items():
            setattr(transfer if name == "corrupt" else behaviour, name, value)
        return {
            "asked": toy.asked, "rendered": toy.rendered, "running": toy.running, "aborted": toy.aborted,
            "pid": os.getpid(), "dangers": transfer.dangers, "fetched": transfer.fetched,
            "pinned": transfer.pinned_blocks,
        }  # fmt: skip

    @app.post("/inference/v1/generate")
    async def generate(request: Request) -> Response:
        nonlocal dead
        body = await request.json()
        toy.asked.append(body)
        if behaviour.pools:
            return JSONResponse({"detail": "Not Found"}, 404)
        if behaviour.fault == "refuse":
            return JSONResponse({"error": {"message": "overloaded", "code": 503}}, 503)
        if len(body["token_ids"]) >= behaviour.max_model_len:
            return JSONResponse({"error": {"message": "too long", "code": 400}}, 400)
        chunks = stream(body)
        if body["stream"]:
            return StreamingResponse(chunks, media_type="text/event-stream")
        reading = asyncio.create_task(read(chunks))
        leaving = asyncio.create_task(disconnected(request.receive))
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        for task in (reading, leaving):
            task.cancel()
        told = await reading
        choices = [choice for chunk in told for choice in chunk["choices"]]
        logprobs = choices[0]["logprobs"] and {"content": [row for ch in choices for row in ch["logprobs"]["content"]]}
        choice = {"index": 0, "token_ids": [token for each in choices for token in each["token_ids"]],
                  "finish_reason": choices[-1]["finish_reason"], "logprobs": logprobs}  # fmt: skip
        rows = [None, *({str(token): {"logprob": -1.0, "rank": 1}} for token in body["token_ids"][1:])]
        asks = (body.get("kv_transfer_params") or {}).get("do_remote_decode") and behaviour.transfer
        kept = transfer.keep(f"generate-tokens-{body['request_id']}", body["token_ids"]) if asks else None
        return JSONResponse(
            {"choices": [choice], "prompt_logprobs": rows,
             "usage": told[-1].get("usage"), "kv_transfer_params": kept},
            background=BackgroundTask(os._exit, 9) if kept and behaviour.fault == "dies_behind_prefill" else None,
        )  # fmt: skip

    async def stream(body: dict[str, Any]) -> AsyncIterator[str]:
        nonlocal dead
        params, tokens = body["sampling_params"], list(body["token_ids"])
        start, salt, name = len(tokens), body.get("cache_salt") or "", f"generate-tokens-{body['request_id']}"
        media = media_of(body.get("features"))
        seen = [] if behaviour.blind else seen_in(body.get("features"))
        toy.running += 1
        wrong, reference = "computed", body.get("kv_transfer_params") or {}
        try:
            if reference.get("do_remote_prefill"):
                if behaviour.fault == "dies_on_fetch":
                    os._exit(9)
                wrong = await transfer.fetch(reference, tokens)
            cached = toy.run(tokens, salt, media)
            await asyncio.sleep(behaviour.prefill_s * (len(tokens) - cached) if wrong == "computed" else 0)
            for step in range(params["max_tokens"]):
                await asyncio.sleep(behaviour.step_s)
                if behaviour.fault in ("error_event", "dead_core") and step == behaviour.fault_at:
                    dead = behaviour.fault == "dead_core"
                    yield f"data: {json.dumps({'error': {'message': 'EngineCore died', 'code': 500}})}\n\n"
                    yield "data: [DONE]\n\n"
                    return
                while behaviour.fault == "hang":  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                token = toy.next_token(tokens, start, params, seen)
                if wrong == "first" or (wrong == "later" and step):
                    token = MIN_ID + (token + 1) % IDS
                tokens.append(token)
                ends = token in params["stop_token_ids"] and step + 1 > params["min_tokens"]
                reason = "stop" if ends else "length" if step + 1 == params["max_tokens"] else None
                told = {"content": [row(token, params["logprobs"])]} if "logprobs" in params else None
                choice = {"index": 0, "token_ids": [token], "finish_reason": reason, "logprobs": told,
                          "stop_reason": token if ends else None}  # fmt: skip
                yield f"data: {json.dumps({'request_id': name, 'choices': [choice]})}\n\n"
                if reason:
                    break
            usage: dict[str, Any] = {"prompt_tokens": start, "completion_tokens": len(tokens) - start}
            if behaviour.details:
                usage["prompt_tokens_details"] = {"cached_tokens": cached}
            yield f"data: {json.dumps({'request_id': name, 'choices': [], 'usage': usage})}\n\n"
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            toy.aborted += 1
            raise
        finally:
            toy.running -= 1
            toy.run(tokens[:-1], salt, media)

    mount_media(app, behaviour, toy)
    mount_pooling(app, behaviour, toy.asked)
    mount_tokenizer(app)
    if behaviour.hears:
        mount_speech(app)
    return app


def main() -> None:
    behaviour = Behaviour(**json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})
    port = int(sys.argv[1])
    uvicorn.run(app_of(behaviour, port), host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
