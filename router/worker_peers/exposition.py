"""Merges the Prometheus metrics of several router processes, with a label for each process.

Samples are labelled rather than summed. A sum would fall when a process is replaced or is late, and Prometheus would
take that for a counter reset."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping

from prometheus_client import generate_latest

from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.router.worker_peers.peers import WorkerPeers

_TENANT = re.compile(rb'[{,]tenant="((?:[^"\\]|\\.)*)"')
LABEL = "worker"
"""Label with the process's number."""
UP = "kvferry_worker_up"
"""Metric added by the merge: 1 for each process that answered, else 0."""


async def scraped(metrics: RouterMetrics, peers: WorkerPeers, viewer: str | None = None) -> bytes:
    """Return this process's answer to a scrape: its own metrics and those of its peers.

    viewer: the only tenant whose samples are shown, or an empty string; None: those of all tenants are shown."""
    text = await _all_metrics(metrics, peers)
    if viewer is None:
        return text
    lines = text.splitlines(keepends=True)
    return b"".join(line for line in lines if not (found := _TENANT.search(line)) or found[1] in (b"", viewer.encode()))


async def _all_metrics(metrics: RouterMetrics, peers: WorkerPeers) -> bytes:
    own = generate_latest(metrics.registry)
    if peers.alone:
        return own
    texts: dict[int, str | None] = {peers.own: own.decode()}
    for number, answer in (await peers.call("metrics")).items():
        texts[number] = None if answer is None else answer.decode()
    return merge(texts).encode()


def merge(texts: Mapping[int, str | None]) -> str:
    """Merge the expositions by process; None for a process that does not answer."""
    families: dict[str, list[str]] = {}
    for number, text in sorted(texts.items()):
        for header, samples in _families(text or ""):
            families.setdefault(header, []).extend(_labelled(sample, number) for sample in samples)
    up = f"# HELP {UP} 1 for each process of this router that answered.\n# TYPE {UP} gauge\n"
    families[up] = [f'{UP}{{{LABEL}="{number}"}} {float(text is not None)}\n' for number, text in sorted(texts.items())]
    return "".join(header + "".join(samples) for header, samples in families.items())


def _families(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each metric family: its comment lines and its samples."""
    header, samples = "", list[str]()
    for line in io.StringIO(text, newline="\n"):
        if not line.startswith("#"):
            samples.append(line)
            continue
        if samples:
            yield header, samples
            header, samples = "", []
        header += line
    yield header, samples


def _labelled(sample: str, number: int) -> str:
    """Add the process label to a sample: `name{a="b"} 1` or `name 1`."""
    name, labels, rest = sample.partition("{")
    if not labels or " " in name:
        name, _, value = sample.partition(" ")
        return f'{name}{{{LABEL}="{number}"}} {value}'
    return f'{name}{{{LABEL}="{number}",{rest}'
