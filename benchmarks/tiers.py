"""Measures the time to first token of prompts that a node computes, and of prompts that it reads from a disk or store.

    python -m benchmarks.tiers [--model smollm2] [--tokens 256 512 1024 2048 4096] [--rounds 5] [--path DIR | --url URL]

One prefill process computes a prompt, evicts it from a small pool by other prompts, and gets it again. It prints
medians of the rounds in milliseconds, after the disk's read rate through the system's cache and past it (O_DIRECT), 4
MiB at a time."""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.fetching import ANSWER_S, Node, PromptClient, nodes

PIECE, PIECES = 4 << 20, 64
EVICTING_PROMPTS = 3
"""Prompts between two equal ones, which evict the first; the pool holds two and a half."""
WRITE_S = 0.5
"""Seconds until new blocks are written and no longer held by the write."""


def gib_per_s(path: Path, flags: int) -> float:
    """Return GiB per second of reading a file of zeros that was just written."""
    file = os.open(path, os.O_RDONLY | flags)
    buffer = mmap.mmap(-1, PIECE)
    began = time.perf_counter()
    try:
        for _ in range(PIECES):
            os.readv(file, [buffer])
    finally:
        os.close(file)
    return PIECE * PIECES / (time.perf_counter() - began) / 2**30


def raw(folder: Path) -> tuple[float, float]:
    """Return GiB per second through the system's cache and past it; 0.0 if the file system refuses that."""
    path = folder / "zeros"
    with path.open("wb") as file:
        for _ in range(PIECES):
            file.write(bytes(PIECE))
        os.fsync(file.fileno())
    try:
        return gib_per_s(path, 0), gib_per_s(path, os.O_DIRECT)
    except OSError:
        return gib_per_s(path, 0), 0.0
    finally:
        path.unlink()


def compare(prompt_client: PromptClient, node: Node, tokens: int, rounds: int) -> tuple[float, float, int]:
    """Return median seconds of computing and of reading, and the tokens read; the first round does not count."""
    computed, read, read_tokens = [], [], 0
    for number in range(rounds + 1):
        seed = 1000 * number
        took_s, first = prompt_client.first(node, tokens, seed)
        computed.append(took_s)
        for other in range(1, EVICTING_PROMPTS + 1):
            time.sleep(WRITE_S)
            prompt_client.first(node, tokens, seed + other)
        time.sleep(WRITE_S)
        took_s, again = prompt_client.first(node, tokens, seed)
        if again.token_ids != first.token_ids:
            raise RuntimeError("read blocks give another token than computed blocks")
        assert again.reuse is not None
        read.append(took_s)
        read_tokens = again.reuse.reused_prefill
    return statistics.median(computed[1:]), statistics.median(read[1:]), read_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of the node")
    parser.add_argument("--path", help="directory on the disk in question")
    parser.add_argument("--url", help="of a store instead, as --kv-remote-url takes it; what is written there stays")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.path) as folder:
        cached, direct = raw(Path(folder))
        print(f"reads of the disk: {cached:.1f} GiB/s through the system's cache, {direct:.1f} past it\n")
        print("| prompt | computed | read | read share | speed-up |")
        print("| ---: | ---: | ---: | ---: | ---: |")
        for tokens in arguments.tokens:
            node_folder = Path(folder) / str(tokens)
            node_folder.mkdir()
            blocks = ("--kv-blocks", str(5 * tokens // 32), "--max-model-len", str(tokens + 64))
            tier = (
                ("--kv-remote-url", f"{arguments.url}/{node_folder.name}")
                if arguments.url
                else ("--kv-disk-path", str(node_folder))
            )
            options = (*blocks, "--threads", str(arguments.threads), *tier)
            with (
                nodes(arguments.model, node_folder, *options, names=("node",)) as (node,),
                httpx.Client(trust_env=False, timeout=ANSWER_S) as client,
            ):
                computed_s, read_s, read_tokens = compare(PromptClient(client, 1000), node, tokens, arguments.rounds)
            figures = f"{1e3 * computed_s:.0f} ms | {1e3 * read_s:.0f} ms | {read_tokens / tokens:.0%}"
            print(f"| {tokens} | {figures} | {computed_s / read_s:.1f} |", flush=True)


if __name__ == "__main__":
    main()
