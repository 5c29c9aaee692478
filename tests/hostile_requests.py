"""A seeded source of hostile requests, as bytes for a socket: what no honest client sends."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass
from typing import Any

TURN = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": None, "messages": [TURN, {"role": "assistant", "content": [{"type": "text", "text": "Yes"}]}, TURN],
        "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 1, "n": 1, "stop": ["x"],
        "stream": False,
        "stream_options": None, "logit_bias": {"5": 1.5}, "logprobs": True, "top_logprobs": 2, "tools": [TOOL],
        "tool_choice": "auto", "response_format": {"type": "text"}, "chat_template_kwargs": {"a": 1}, "documents": [{}],
    },
    "/v1/completions": {
        "prompt": "Hi", "max_tokens": 3, "echo": False, "best_of": 1, "logprobs": 2, "min_tokens": 0, "min_p": 0.1,
        "repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1, "bad_words": ["x"],
        "allowed_token_ids": [5, 6], "stop_token_ids": [7], "prompt_logprobs": None, "truncate_prompt_tokens": 5,
        "priority": 0, "cache_salt": "x", "use_beam_search": False, "suffix": None,
    },
    "/v1/responses": {
        "input": [TURN], "instructions": "x", "max_output_tokens": 3, "store": True, "previous_response_id": None,
        "text": {"format": {"type": "text"}}, "metadata": {"a": "b"}, "include": [], "truncation": "auto",
    },
    "/v1/messages": {
        "model": "m", "messages": [TURN], "max_tokens": 3, "system": "x", "stop_sequences": ["x"],
        "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"},
    },
    "/v1/messages/count_tokens": {"messages": [TURN], "system": [{"type": "text", "text": "x"}]},
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "float", "dimensions": 1},
    "/v1/score": {"text_1": "a", "text_2": ["b"]},
    "/v1/rerank": {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1},
    "/v1/classify": {"input": "a"},
    "/tokenize": {"prompt": "Hi", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/batches": {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"},
}  # fmt: skip
OTHERS = (
    "/", "/health", "/ready", "/metrics", "/v1/models", "/v1/models/x%2fy%00", "/openapi.json", "/docs", "/v1/files",
    "/v1/files/../../etc/passwd", "/v1/files/%2e%2e%2fx/content", "/v1/batches/x/cancel", "/v1/responses/resp_x",
    "/v1/responses/resp_x/input_items?limit=-1&after=%ff", "/v1/files?limit=99999999999999999999&after=%00",
    "/v1/nothing",
    "//", "/%ff", "/" + "a" * 8000, "/v1/load_lora_adapter",
)  # fmt: skip
METHODS = ("GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH", "TRACE")
EDGES = [sign * (2**power + step) for power in (0, 31, 32, 53, 63, 64, 1000) for step in (-1, 0, 1) for sign in (1, -1)]
RAW = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "-0.0",
    "1e-400",
    "9" * 4000,
    '"\\ud800"',
    '"\\u0000"',
    "[" * 150 + "]" * 150,
)
"""JSON, or nearly, that Python's own writer does not write."""


@dataclass(frozen=True, slots=True)
class Hostile:
    """One request. leaves_s: when its client goes away without having read, None: it reads; parts: pauses between
    them."""

    parts: tuple[bytes, ...]
    leaves_s: float | None
    told: str


def hostile(rng: random.Random) -> Hostile:
    """The next request of this source."""
    kind = rng.choices(("body", "http", "method", "bytes"), (70, 12, 12, 6))[0]
    data = {"body": _posted, "http": _framed, "method": _asked, "bytes": _garbage}[kind](rng)
    parts: tuple[bytes, ...] = (data,)
    if rng.random() < 0.1 and len(data) > 2:
        cut = rng.randrange(1, len(data))
        parts = (data[:cut], data[cut:])
    leaves = rng.uniform(0, 0.2) if rng.random() < 0.12 else None
    return Hostile(parts, leaves, kind)


def _head(method: str, target: str, length: int, *more: str) -> bytes:
    lines = (f"{method} {target} HTTP/1.1", "host: x", "connection: close", f"content-length: {length}", *more)
    return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n"


def _posted(rng: random.Random) -> bytes:
    path = rng.choice(tuple(BODIES))
    data = _body(rng, path)
    return _head("POST", path, len(data)) + data


def _body(rng: random.Random, path: str) -> bytes:
    value = copy.deepcopy(BODIES[path])
    for name in rng.sample(sorted(value), rng.randrange(len(value))):
        if name not in ("messages", "prompt", "input"):
            del value[name]
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        _damage(value, rng)
    if rng.random() < 0.3:
        value[rng.choice(_NAMES)] = _odd(rng)
    data = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    data = data.replace(b'"@raw"', rng.choice(RAW).encode())
    match rng.randrange(30):
        case 0:
            return data[: rng.randrange(len(data))]
        case 1:
            at = rng.randrange(len(data))
            return data[:at] + rng.randbytes(3) + data[at:]
        case 2:
            return data.decode("utf-8", "replace").encode("utf-16")
        case 3:
            return data + b"," + data
    return data


def _damage(value: Any, rng: random.Random) -> None:
    """Change something at some depth, in one place alone: what lies on the way there is copied, for lists may hold one
    object thousands of times, and others' requests hold it, too."""
    while True:
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not places:
            return
        place = rng.choice(places)
        inner = value[place]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.6:
            value[place] = value = copy.copy(inner)
            continue
        value[place] = _odd(rng)
        return


def _odd(rng: random.Random) -> Any:
    match rng.randrange(14):
        case 0 | 1:
            return rng.choice(EDGES)
        case 2:
            return "@raw"
        case 3:
            return rng.choice(
                (None, True, False, "", " ", "x", "\0", "\ud800", "é日\U0001f600", "<|im_end|>", "{{ 1 }}")
            )
        case 4:
            return "river stone " * rng.choice((1, 100, 20_000))
        case 5:
            return [_odd(rng) for _ in range(rng.randrange(4))]
        case 6:
            return {rng.choice(("a", "", "type", "text", "role", "\0")): _odd(rng) for _ in range(rng.randrange(4))}
        case 7:
            return [rng.choice((0, "a", [], {}, TURN, TOOL, None))] * rng.choice((1, 70, 3000, 9000))
        case 8:
            return rng.choice((0.1, -1.5, 1e308, 2.0000001, 5e-324))
        case 9:
            return {"type": rng.choice(("json_schema", "regex", "text", "x", "function", "structural_tag", "grammar")),
                    "json_schema": {"name": "x", "schema": rng.choice((SCHEMA, {}, True, _deep(40), 5))},
                    "pattern": rng.choice(("a*", "(", "(a+)+$", "[" * 90)), "function": {"name": "f"}}  # fmt: skip
        case 10:
            return _deep(rng.randrange(1, 120))
        case 11:
            return {str(number): number for number in range(rng.choice((1, 64, 400)))}
        case 12:
            return json.dumps(_deep(60)) if rng.random() < 0.5 else "[" * 20_000
    return rng.choice((TURN, TOOL, SCHEMA))


def _deep(levels: int) -> Any:
    value: Any = {"type": "string"}
    for level in range(levels):
        value = [value] if level % 3 == 0 else {"type": "object", "properties": {"a": value}, "required": ["a"]}
    return value


_NAMES = [
    *sorted({name for body in BODIES.values() for name in body}),
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "json_schema", "grammar",
    "functions", "function_call", "parallel_tool_calls", "reasoning_effort", "continue_final_message",
    "add_generation_prompt", "return_token_ids", "length_penalty", "ignore_eos", "background", "modalities", "audio",
    "user", "encoding_format",
]  # fmt: skip


def _framed(rng: random.Random) -> bytes:
    """A body whose framing lies, or headers that are odd."""
    path = rng.choice(tuple(BODIES))
    data = _body(rng, path)
    match rng.randrange(9):
        case 0:
            return _head("POST", path, len(data) + rng.choice((1, 10**6, 10**18)), "connection: close") + data
        case 1:
            return _head("POST", path, len(data), f"content-length: {len(data) + 1}") + data
        case 2:
            return _head("POST", path, len(data), "transfer-encoding: chunked") + b"%x\r\n" % len(data) + data
        case 3:
            chunks = b"".join(
                b"%x;x=y\r\n%b\r\n" % (len(data[at : at + 9]), data[at : at + 9]) for at in range(0, 400, 9)
            )
            return (
                b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
                % path.encode()
                + chunks
            )
        case 4:
            return (
                _head("POST", path, len(data), *(f"x-{number}: {number}" for number in range(rng.choice((50, 400)))))
                + data
            )
        case 5:
            return _head("POST", path, len(data), "x: " + "y" * rng.choice((5000, 70_000))) + data
        case 6:
            return (
                _head("POST", path, len(data), "content-encoding: gzip", "expect: 100-continue", "range: bytes=0-")
                + data
            )
        case 7:
            odd = rng.choice(("x-request-id: \xff\xfe", "authorization: Bearer \xc3", "traceparent: 00-x",
                              "content-type: x/\xff",
                              "cookie: " + "a=b;" * 999, "host: a\tb", "accept-encoding: \x7f"))  # fmt: skip
            return _head("POST", path, len(data), odd) + data
    return (_head("POST", path, len(data)) + data) * rng.randrange(2, 6)


def _asked(rng: random.Random) -> bytes:
    target = rng.choice((*OTHERS, *BODIES))
    data = rng.choice((b"", b"{}", b"x" * 99, b"\xff" * 5))
    kind = rng.choice(("application/json", "multipart/form-data; boundary=x", "multipart/form-data", "text/plain"))
    if "boundary" in kind:
        data = rng.choice((
            b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            b'--x\r\ncontent-disposition: form-data; name="file"; filename="../x"\r\n\r\n{"a":1}\n\r\n--x--\r\n',
            b"--x\r\n\r\n--x--", b"--x\r\ncontent-disposition: form-data\r\n\r\n", b"-" * 5000,
        ))  # fmt: skip
    return _head(rng.choice(METHODS), target, len(data), f"content-type: {kind}") + data


def _garbage(rng: random.Random) -> bytes:
    return rng.choice((
        rng.randbytes(rng.randrange(1, 300)), b"\r\n" * 200, b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00" * 9,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health HTTP/1.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
        b"GET " + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b"GET /health HTTP/1.1\n\n", b"GET /health\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\n\r\n",
    ))  # fmt: skip
