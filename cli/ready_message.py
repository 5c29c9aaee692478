"""Message that `kvferry serve` prints when the cluster is ready: processes, example requests, how to stop."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence

from kvferry.cli.child import Child

FACTS = {"device": "computes on", "kv_pool": "KV pool", "link": "link"}
"""Fields of a worker's ready report, and their column headings."""


def overview(children: Iterable[Child]) -> list[str]:
    """Return a table with a heading and one line per process; it shows the models if there are several."""
    children = list(children)
    models = {child.facts["model"] for child in children if "model" in child.facts}
    facts = FACTS | ({"model": "model"} if len(models) > 1 else {})
    return aligned([("", "pid", "address", *facts.values()), *(_row(child, facts) for child in children)])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines whose columns are as wide as their longest word."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def ready_line(url: str, model: str, api_key: str, *, speech: bool = False) -> str:
    """Return the line with the cluster's URL and an example request. speech: the model transcribes it."""
    key = ["-H", "Authorization: Bearer YOUR_API_KEY"] if api_key else []
    if speech:
        curl = ["curl", f"{url}/v1/audio/transcriptions", *key, "-F", f"model={model}", "-F", "file=@speech.wav"]
    else:
        question = [{"role": "user", "content": "Why is the sky blue?"}]
        body = json.dumps({"model": model, "temperature": 0.2, "messages": question})
        curl = ["curl", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json", *key, "-d", body]
    return f"kvferry is ready at {url}/v1 - try: {shlex.join(curl)}"


def stop_line(pid: int) -> str:
    """Return the line that says how to stop the cluster."""
    return f"Ctrl-C stops it (elsewhere: kill {pid})"


def _row(child: Child, facts: Iterable[str]) -> tuple[str, ...]:
    named = (child.facts.get(name, "") for name in facts)
    return (child.name, str(child.pid or ""), child.url or child.command.address, *named)
