"""Measures how fast UCX moves KV blocks between two processes on this machine's GPU, with different UCX options.

    python -m benchmarks.gpu_link [--tiny] [--rows FILE]

Two processes move blocks as large as those of an 8-billion-parameter model from device memory to device memory and
check their content. The options are those of the link (`kv_transfer.ucx_library`) and variants that differ in one each.
Hundreds of GB/s show that cuda_ipc carries the blocks; a few show that they are staged in host memory. --tiny: small,
from host to host."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_rows import Rows
from kvferry.kv_transfer.ucx_library import context_options, load

BLOCK_BYTES, BLOCKS, ROUNDS = 2 << 20, 128, 4
LIMIT_S = 8.0
"""Maximum time of one variant, in seconds."""
LINK = "the link's options"
VARIANTS: dict[str, dict[str, Any]] = {
    LINK: {},
    "rendezvous from 8 KiB": {"RNDV_THRESH": "8192"},
    "get_zcopy": {"RNDV_SCHEME": "get_zcopy"},
    "put_zcopy": {"RNDV_SCHEME": "put_zcopy"},
    "without posix": {"TLS": "tcp,self,cuda_copy,cuda_ipc"},
    "without error handling": {"error handling": False},
    "without waking": {"wakeup": False},
    "all transports": {"TLS": "all"},
}
"""Options that differ from the link's."""


class End:
    """One process's end of a connection. change: as in VARIANTS."""

    def __init__(self, change: dict[str, Any], cuda: bool) -> None:
        library = self.library = load()
        api = library.api
        options = context_options("127.0.0.1", gpu="cuda" if cuda else "") | change
        handled, wakes = options.pop("error handling", True), options.pop("wakeup", True)
        features = (api.Feature.TAG, api.Feature.WAKEUP) if wakes else (api.Feature.TAG,)
        self._context = api.UCXContext(options, features)
        self.worker = api.UCXWorker(self._context, enable_delayed_submission=False, enable_python_future=False)
        self.address: bytes = self.worker.address.tobytes()
        self._handled = handled

    def connect(self, address: bytes) -> None:
        target = self.library.api.UCXAddress.create_from_buffer(address)
        self._endpoint = self.worker.create_endpoint_from_worker_address(target, self._handled)

    def move(self, blocks: torch.Tensor, send: bool) -> None:
        """Send or receive all blocks [count, bytes], each with a tag of its own. Raises TimeoutError."""
        call = self._endpoint.tag_send if send else self._endpoint.tag_recv
        arrays = [self.library.array(block if block.is_cuda else block.numpy()) for block in blocks]
        requests = [call(array, self.library.api.UCXXTag(tag)) for tag, array in enumerate(arrays)]
        until = time.monotonic() + LIMIT_S
        while not all(request.completed for request in requests):
            for _ in range(1000):
                self.worker.progress_once()
            if time.monotonic() > until:
                raise TimeoutError(f"{sum(each.completed for each in requests)} of {len(requests)} blocks moved")
        for request in requests:
            request.check_error()


def blocks_of(device: str, count: int, size: int, filled: bool) -> torch.Tensor:
    """Return uint8 [count, size] on the device: each block filled with a different number, or zeros."""
    made = torch.zeros(count, size, dtype=torch.uint8, device=device)
    if filled:
        made += torch.arange(1, count + 1, device=device, dtype=torch.uint8)[:, None]
    if made.is_cuda:
        torch.cuda.synchronize()
    return made


def answer(device: str, count: int, size: int) -> None:
    """Run the sending process: for each variant exchange options and addresses as JSON lines, then run the rounds."""
    kept = blocks_of(device, count, size, filled=True)
    for line in sys.stdin:
        args = json.loads(line)
        try:
            end = End(args["change"], kept.is_cuda)
            print(json.dumps({"address": end.address.hex()}), flush=True)
            end.connect(bytes.fromhex(json.loads(sys.stdin.readline())["address"]))
            for _ in range(ROUNDS):
                end.move(kept, send=True)
        except Exception as error:
            print(json.dumps({"error": f"{type(error).__name__} {error}"}), flush=True)


def measure(change: dict[str, Any], target: torch.Tensor, sender: subprocess.Popen[str]) -> list[float]:
    """Return the seconds of each round. Raises RuntimeError for a failure on either side."""
    assert sender.stdin is not None
    assert sender.stdout is not None
    sender.stdin.write(json.dumps({"change": change}) + "\n")
    sender.stdin.flush()
    message = json.loads(sender.stdout.readline())
    if "error" in message:
        raise RuntimeError(message["error"])
    end = End(change, target.is_cuda)
    sender.stdin.write(json.dumps({"address": end.address.hex()}) + "\n")
    sender.stdin.flush()
    end.connect(bytes.fromhex(message["address"]))
    taken = []
    for _ in range(ROUNDS):
        target.zero_()
        began = time.perf_counter()
        end.move(target, send=False)
        taken.append(time.perf_counter() - began)
        wanted = torch.arange(1, len(target) + 1, device=target.device, dtype=torch.uint8)
        if not torch.equal(target[:, 0], wanted) or not torch.equal(target[:, -1], wanted):
            raise RuntimeError("the received blocks differ from those sent")
    return taken


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="KV blocks between two processes over UCX")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--answer", metavar="DEVICE", help="be the process that sends")
    args = parser.parse_args(arguments)
    count, size = (4, 4096) if args.tiny else (BLOCKS, BLOCK_BYTES)
    if args.answer:
        answer(args.answer, count, size)
        return
    if not args.tiny and not torch.cuda.is_available():
        sys.exit("gpu_link needs a CUDA device, but PyTorch finds none; nothing was measured.")
    rows, device = Rows("link", args.rows), "cpu" if args.tiny else "cuda"
    target = blocks_of(device, count, size, filled=False)
    names = [LINK] if args.tiny else list(VARIANTS)
    command = [sys.executable, "-m", "benchmarks.gpu_link", "--answer", device, *(["--tiny"] if args.tiny else [])]
    sender: subprocess.Popen[str] | None = None
    for name in names:
        sender = sender or started(command)
        try:
            taken = measure(VARIANTS[name], target, sender)
            rows.put(name, f"{target.nbytes / min(taken) / 1e9:.2f} GB/s, {min(taken) / count * 1e6:.1f} us a block")
            print(f"{name:45} {' '.join(f'{target.nbytes / each / 1e9:8.2f}' for each in taken)} GB/s", flush=True)
        except Exception as error:
            rows.wrong(name, error)
            print(f"{name:45} {type(error).__name__} {error}", flush=True)
            stop(sender)
            sender = None
    if sender is not None:
        stop(sender)


def started(command: list[str]) -> subprocess.Popen[str]:
    """Start the sending process; lines that UCX logs to standard output are not taken as answers."""
    environment = os.environ | {"UCX_LOG_FILE": "stderr"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def stop(sender: subprocess.Popen[str]) -> None:
    sender.kill()
    sender.wait()


if __name__ == "__main__":
    main()
