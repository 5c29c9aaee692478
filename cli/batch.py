"""`kvferry batch`: sends the requests of a file to a running server with bounded concurrency."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import httpx
from tqdm import tqdm

from kvferry.protocol.errors import ConfigError, reason

RETRYABLE = (408, 429, 500, 502, 503, 504)
"""Status codes after which a row is retried."""
MAX_WAIT_S = 10.0
"""Longest pause before a row is retried, in seconds."""
_READ = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class BatchClient:
    """Target and limits of a batch run; times are in seconds.

    The help of `kvferry batch` describes each field."""

    url: str
    api_key: str
    concurrency: int
    timeout: float
    patience: float


async def run_batch(source: Path, target: Path, server: BatchClient) -> int:
    """Run a batch; return exit status 1 if a row failed, else 0. Raises ConfigError for unusable files."""
    rows = list(_rows(source))
    done = _completed_ids(target)
    remaining = [row for row in rows if row["custom_id"] not in done]
    headers = {"authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    limits = httpx.Limits(max_connections=server.concurrency, max_keepalive_connections=server.concurrency)
    failed = 0
    bar = tqdm(total=len(rows), initial=len(rows) - len(remaining), unit=" rows", disable=not sys.stderr.isatty())
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=server.timeout, limits=limits) as client:
        with target.open("a") as out, bar:
            queue = iter(remaining)

            async def work() -> None:
                nonlocal failed
                for row in queue:
                    answer = await _ask(client, row, server.patience)
                    failed += not _succeeded(answer)
                    out.write(json.dumps(answer, ensure_ascii=False) + "\n")
                    out.flush()
                    bar.update()

            async with asyncio.TaskGroup() as workers:
                for _ in range(min(server.concurrency, len(remaining))):
                    workers.create_task(work())
    print(f"{len(rows)} rows: {len(rows) - failed} answered, {failed} failed", file=sys.stderr)
    return int(failed > 0)


def _rows(source: Path) -> Iterator[dict[str, Any]]:
    """Yield the requests of a file. Raises ConfigError at the first line that is not a request."""
    seen = set()
    try:
        lines: TextIO
        with source.open() as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                row = _row(line)
                if row is None or row["custom_id"] in seen:
                    why = f"an object with {', '.join(_READ)}; the method POST" if row is None else "another custom_id"
                    raise ConfigError(f"{source}:{number}: each line needs {why}")
                seen.add(row["custom_id"])
                yield row
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: {reason(error)}") from error


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
        whole = isinstance(row["body"], dict) and row["url"].startswith("/") and row["method"] == "POST"
        return row if whole and isinstance(row["custom_id"], str) and not row["body"].get("stream") else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _completed_ids(target: Path) -> set[str]:
    """Return the ids of the answered rows; removes failed rows and truncated lines from the output file."""
    if not target.exists():
        return set()
    completed = []
    try:
        for line in target.read_text().split("\n"):
            try:
                row = json.loads(line)
                if _succeeded(row):
                    completed.append((str(row["custom_id"]), line))
            except (ValueError, KeyError, TypeError):
                continue
        partial_path = target.with_name(target.name + ".part")
        partial_path.write_text("".join(line + "\n" for _, line in completed))
        os.replace(partial_path, target)
    except OSError as error:
        raise ConfigError(f"{target}: {reason(error)}") from error
    return {custom_id for custom_id, _ in completed}


def _succeeded(row: dict[str, Any]) -> bool:
    return bool(row["response"]) and row["response"]["status_code"] == 200


async def _ask(client: httpx.AsyncClient, row: dict[str, Any], patience: float) -> dict[str, Any]:
    """Send a request and return its output row; retries transient failures until `patience` ends."""
    until, wait_s = time.monotonic() + patience, 0.5
    while True:
        response, error = None, ""
        try:
            response = await client.post(row["url"], json=row["body"])
        except httpx.HTTPError as failure:
            error = reason(failure)
        if response is not None:
            wait_s = _retry_wait(response, wait_s)
        if (response is not None and response.status_code not in RETRYABLE) or time.monotonic() + wait_s > until:
            return _answer(row["custom_id"], response, error)
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, MAX_WAIT_S)


def _retry_wait(response: httpx.Response, wait_s: float) -> float:
    try:
        return max(wait_s, float(response.headers.get("retry-after", wait_s)))
    except ValueError:
        return wait_s


def _answer(custom_id: str, response: httpx.Response | None, error: str) -> dict[str, Any]:
    row: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id}
    if response is None:
        return {**row, "response": None, "error": {"code": "connection_failed", "message": error}}
    try:
        body = response.json()
    except ValueError:
        body = response.text
    request_id = response.headers.get("x-request-id", "")
    return {
        **row,
        "response": {"status_code": response.status_code, "request_id": request_id, "body": body},
        "error": None,
    }
