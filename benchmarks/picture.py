"""Measures the time to first token of a picture with a short question: kvferry, transformers and llama.cpp.

    python -m benchmarks.picture [--edge 512] [--rounds 10] [--only kvferry,transformers-bf16]

All have the same random weights of SmolVLM 256M's shape in bfloat16 and the same threads, are alive at once and take
turns; each round shows a picture of 512 x 512 pixels that none has seen. It is resized to `--edge` pixels and cut into
tiles of 512 with 64 tokens each. Where these are several, the whole picture is added (edge 2,048 in the published
model: 17 tiles). llama.cpp adds it to a single tile, too."""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path

import httpx
import numpy as np
from PIL import Image

from benchmarks import servers
from benchmarks.load import Target
from benchmarks.models import CACHE, on_path
from benchmarks.picture_models import TILE, VisionModel, image_tokens, random_vision_model
from benchmarks.picture_transformers import Transformers
from benchmarks.subjects import APART, BF16, TOGETHER, Installed, Launch, Subject, kvferry
from benchmarks.table import markdown
from kvferry.cli.bootstrap import set_threads
from kvferry.runtime.limits import available_cores

QUESTION = "What do you see in this picture?"
TOKENS = 4
"""Output tokens of a request, the first of which is timed."""
SMALL_POOL = ("--kv-cache-gib", "0.25")
Answered = tuple[float, int]
"""Seconds to the first token, and the prompt's tokens."""
Ask = Callable[[bytes], Answered]
"""Answers the question about a PNG file."""
KVFERRY = {
    "kvferry": APART,
    "kvferry-encode": (*APART, "--encode", "1"),
    "kvferry-one-process": TOGETHER,
}
"""Options of `kvferry serve` by row."""
LLAMA, BFLOAT, FLOAT = "llama.cpp", "transformers-bf16", "transformers-float32"
ROWS = (*KVFERRY, BFLOAT, LLAMA, FLOAT)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=available_cores(), help="of every engine")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--edge", type=int, default=TILE, help="pixels that a picture's side is resized to")
    parser.add_argument("--only", default=",".join(ROWS), metavar="ROWS", help="default: %(default)s")
    parser.add_argument("--llama-server", type=Path, default=on_path("llama-server"))
    options = parser.parse_args()
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(ROWS):
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    if options.edge % TILE:
        parser.error(f"--edge must be a multiple of {TILE}")
    return options


def picture(number: int) -> bytes:
    """Return a PNG file of smooth noise."""
    noise = np.random.default_rng(number).integers(0, 256, (16, 16, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(noise).resize((TILE, TILE), Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()


def by_server(target: Target, png: bytes) -> Answered:
    """Stream a chat, and return when its first text came."""
    url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    body = {
        "model": target.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    began, first, tokens = time.perf_counter(), 0.0, 0
    with httpx.stream("POST", f"{target.url}/v1/chat/completions", json=body, timeout=600, trust_env=False) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{target.url}: {answer.read().decode()}")
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            now, event = time.perf_counter(), json.loads(line[6:])
            if not first and any(choice["delta"].get("content") for choice in event["choices"]):
                first = now
            tokens = (event.get("usage") or {}).get("prompt_tokens", tokens)
    return first - began, tokens


def llama_cpp(model: VisionModel, options: argparse.Namespace, port: int) -> Launch:
    """Return llama-server's command line, with the default format of its cache, and no cache of prompts."""
    serve = (str(options.llama_server), "--host", "127.0.0.1", "--port", str(port), "-m", str(model.text), "--jinja")
    sizes = ("-t", str(options.threads), "--parallel", "1", "-c", "4096", "--cache-ram", "0")
    return Launch((*serve, "--mmproj", str(model.tower), *sizes), "/health")


@contextmanager
def subject(row: str, model: VisionModel, options: argparse.Namespace) -> Iterator[Ask]:
    """Run one row's engine until exit."""
    if row in (BFLOAT, FLOAT):
        yield Transformers(model.checkpoint, row == BFLOAT, QUESTION).ask
        return
    port = servers.free_port()
    if row == LLAMA:
        launch = llama_cpp(model, options, port)
    else:
        own = Subject(row, "kvferry", row, row, args=(*BF16, *SMALL_POOL, *KVFERRY[row]))
        launch = kvferry(own, model.checkpoint, Installed(None, None, options.threads), port)
    with servers.running(launch, port, CACHE / f"picture-{row}.log") as server:
        yield lambda png: by_server(server.target, png)


def measure(options: argparse.Namespace) -> dict[str, list[Answered]]:
    """Return the answers of each row: one picture warms up, and each round begins with another row."""
    model = random_vision_model(CACHE, options.edge)
    rows = [row for row in options.only if row != LLAMA or options.llama_server]
    found: dict[str, list[Answered]] = {row: [] for row in rows}
    with ExitStack() as stack:
        subjects = {row: stack.enter_context(subject(row, model, options)) for row in rows}
        for number in range(-1, options.rounds):
            for place in range(len(rows)):
                row = rows[(place + number) % len(rows)]
                answer = subjects[row](picture(1000 * rows.index(row) + number + 1))
                print(f"{row}, round {number}: {answer[0]:.3f} s", file=sys.stderr, flush=True)
                if number >= 0:
                    found[row].append(answer)
    return found


def report(found: dict[str, list[Answered]]) -> str:
    """Return a table of medians with the lowest and the highest, in seconds."""
    rows = []
    for row, answers in found.items():
        seconds = [each for each, _ in answers]
        spread = f"{min(seconds):.3f} - {max(seconds):.3f}"
        rows.append((row, f"{statistics.median(seconds):.3f}", spread, str(answers[-1][1])))
    return markdown(("", "time to first token, s", "lowest - highest", "prompt tokens"), rows)


def main() -> None:
    options = parse()
    set_threads(options.threads)
    CACHE.mkdir(parents=True, exist_ok=True)
    found = measure(options)
    print(
        f"{TILE} x {TILE} pixels as {image_tokens(options.edge)} image tokens, {options.threads} threads, "
        f"{options.rounds} rounds"
    )
    print(report(found))


if __name__ == "__main__":
    main()
