"""A server that speaks the OpenAI completions API with a toy in the place of the model, in several temperaments.

    python -m tests.engine_adapter.mock_openai PORT '{"form": "text"}'

A token depends on all tokens before it and, with a temperature, on the seed. `POST /mock` changes how it behaves."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse

from kvferry.model_files.source import resolve
from kvferry.model_files.tokenizer import TextTokenizer, load_tokenizer
from kvferry.router.text.detokenizer import detokenizer

MIN_ID, IDS, EOS = 1000, 20_000, 2
"""First and number of the token ids that are drawn; the demo model's end of a message."""
NAMED = frozenset(
    ("model", "prompt", "max_tokens", "temperature", "top_p", "seed", "stream", "stream_options", "logprobs",
     "frequency_penalty", "presence_penalty", "logit_bias", "stop", "n", "echo", "user", "suffix", "best_of")
)  # fmt: skip
"""Fields that the API names; a strict server refuses all others."""


@dataclasses.dataclass
class Behaviour:
    """How the mock behaves.

    form      token_ids (vLLM), tokens, or text: how an event tells what is new
    per_event tokens of an event
    eos_after tokens after which the output ends by itself; 0: never
    fault     "" or what befalls each new request, see `fault`
    created   of the model: start (fixed), now (the time of the look) or none"""

    form: str = "token_ids"
    per_event: int = 1
    step_s: float = 0.0
    eos_after: int = 0
    fault: str = ""
    fault_at: int = 3
    strict: bool = False
    takes_ids: bool = True
    health: bool = True
    created: str = "now"
    details: bool = True
    key: str = ""
    models: tuple[str, ...] = ("toy",)
    max_model_len: int = 4096
    fingerprint: str = "fp_1"


@functools.cache
def tokenizer() -> TextTokenizer:
    return load_tokenizer(resolve("smollm2", weights=False))


def next_token(tokens: list[int], body: dict[str, Any]) -> int:
    seed = body["seed"] if body["temperature"] > 0 else None
    drawn = hashlib.sha256(repr((tokens, seed)).encode()).digest()
    return MIN_ID + int.from_bytes(drawn[:4], "big") % IDS


def expected(prompt: list[int], count: int) -> list[int]:
    """What the toy answers greedily."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, {"temperature": 0}))
    return tokens[len(prompt) :]


def logprobs_of(ids: list[int], as_ids: bool) -> dict[str, Any]:
    """Entries in the completions' form: each token has -0.5, and a rival with -0.25."""

    def name(token: int) -> str:
        return f"token_id:{token}" if as_ids else tokenizer().token_bytes(token).decode("utf-8", "replace")

    return {
        "tokens": [name(token) for token in ids],
        "token_logprobs": [-0.5] * len(ids),
        "top_logprobs": [{name(token): -0.5, name(token + 1): -0.25} for token in ids],
    }


class Server:
    """The state of one mock."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour, self.began = behaviour, int(time.time())
        self.asked: list[dict[str, Any]] = []
        self.running = self.aborted = 0

    def fault(self) -> Response | None:
        """Faults of the whole answer."""
        match self.behaviour.fault:
            case "refuse":
                return JSONResponse({"error": {"message": "busy", "code": 503}}, 503)
            case "limited":
                return JSONResponse({"error": {"message": "slow down"}}, 429)
            case "html":
                return HTMLResponse("<html><body>Please log in</body></html>")
            case "whole":
                return JSONResponse({"choices": [{"index": 0, "text": "hello", "finish_reason": "stop"}]})
        return None

    def refusal(self, body: dict[str, Any]) -> Response | None:
        behaviour = self.behaviour
        if behaviour.strict and (odd := body.keys() - NAMED):
            return JSONResponse({"error": {"message": f"Unrecognized request argument: {min(odd)}"}}, 400)
        if not behaviour.takes_ids:
            return JSONResponse({"error": {"message": "prompt must be a string"}}, 400)
        if 0 < behaviour.max_model_len <= len(body["prompt"]):
            return JSONResponse({"error": {"message": "This model's maximum context length is 4096 tokens"}}, 400)
        return None

    async def events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        """The events of an answer, with the faults in its middle."""
        behaviour, tokens, count = self.behaviour, list(body["prompt"]), 0
        text = detokenizer(tokenizer(), tokens) if behaviour.form == "text" else None
        fresh: list[int] = []
        self.running += 1
        try:
            while True:
                await asyncio.sleep(behaviour.step_s)
                if count == behaviour.fault_at and (broken := await self.broken()) is not None:
                    yield broken
                    return
                ends = behaviour.eos_after and count == behaviour.eos_after
                fresh.append(EOS if ends else next_token(tokens, body))
                tokens.append(fresh[-1])
                count += 1
                reason = "stop" if ends else "length" if count == body["max_tokens"] else None
                if reason and behaviour.fault == "abort":
                    reason = "abort"
                if len(fresh) < behaviour.per_event and not reason:
                    continue
                choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None, "text": ""}
                if text is not None:
                    choice["text"] = "".join(map(text.feed, fresh)) + (text.finish() if reason else "")
                else:
                    choice[behaviour.form] = fresh
                if "logprobs" in body:
                    choice["logprobs"] = logprobs_of(fresh, bool(body.get("return_tokens_as_token_ids")))
                fresh = []
                yield f"data: {json.dumps({'choices': [choice], 'system_fingerprint': behaviour.fingerprint})}\n\n"
                if reason:
                    break
            if behaviour.fault != "no_done":
                usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
                if behaviour.details:
                    usage["prompt_tokens_details"] = {"cached_tokens": 2}
                yield f": ping\n\ndata: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def broken(self) -> str | None:
        """Faults in the middle of an answer: the last that it sends; None: none."""
        match self.behaviour.fault:
            case "error_event":
                return 'data: {"error": {"message": "out of memory", "code": 500}}\n\ndata: [DONE]\n\n'
            case "old_error":
                return 'data: {"object": "error", "message": "out of memory", "code": 500}\n\ndata: [DONE]\n\n'
            case "no_finish":
                return "data: [DONE]\n\n"
            case "odd":
                return 'data: {"choices": [{"index": 0, "text": 5, "token_ids": "x", "logprobs": 7}]}\n\n'
            case "odder":
                return 'data: {"choices": [7]}\n\n'
            case "no_json":
                return "data: {\n\n"
            case "huge_line":
                return "data: " + "x" * (65 * 2**20)
            case "cut":
                raise ConnectionError("the mock breaks the connection")
            case "hang":
                await asyncio.Event().wait()
        return None


def app_of(behaviour: Behaviour) -> FastAPI:
    app, server = FastAPI(), Server(behaviour)

    def locked(request: Request) -> Response | None:
        if behaviour.key and request.headers.get("authorization") != f"Bearer {behaviour.key}":
            return JSONResponse({"error": {"message": "Incorrect API key provided"}}, 401)
        return None

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if behaviour.health else 404)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        if (refused := locked(request)) is not None:
            return refused
        found: list[dict[str, Any]] = [{"id": name, "object": "model"} for name in behaviour.models]
        for each in found:
            if behaviour.max_model_len:
                each["max_model_len"] = behaviour.max_model_len
            if behaviour.created != "none":
                each["created"] = server.began if behaviour.created == "start" else int(time.time())
        return JSONResponse({"object": "list", "data": found})

    @app.post("/mock")
    async def change(request: Request) -> dict[str, Any]:
        for name, value in (await request.json()).items():
            setattr(behaviour, name, value)
        return {"asked": server.asked, "running": server.running, "aborted": server.aborted}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await request.json()
        server.asked.append(body)
        for refused in (locked(request), server.refusal(body), server.fault()):
            if refused is not None:
                return refused
        return StreamingResponse(server.events(body), media_type="text/event-stream")

    return app


def main() -> None:
    behaviour = Behaviour(**json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})
    uvicorn.run(app_of(behaviour), host="127.0.0.1", port=int(sys.argv[1]), log_level="critical")


if __name__ == "__main__":
    main()
