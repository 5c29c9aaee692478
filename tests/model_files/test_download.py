"""Models of a hub, over HTTP, from a process of its own: huggingface_hub reads its variables when it is imported."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.model_files import download
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError
from tests.model_files.fake_hub import COMMIT, FakeHub

ROOT = Path(__file__).parents[2]
CONFIG = json.dumps({"vocab_size": 100, "max_position_embeddings": 64}).encode()
WEIGHTS = os.urandom(3_000_000)
RESOLVE = """
import logging, sys
from kvferry.model_files import download
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError

logging.basicConfig(level="INFO", format="%(message)s")
logging.getLogger("httpx2").setLevel("WARNING")
logging.getLogger("httpx").setLevel("WARNING")
download.LINE_S = 0.0
try:
    print(resolve(sys.argv[1], weights=sys.argv[2] == "weights").path)
except ConfigError as error:
    sys.exit(error.message)
"""


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    files = {"config.json": CONFIG, "tokenizer.json": b"{}", "model.safetensors": WEIGHTS, "x.gguf": b"-"}
    hub = FakeHub(files | {"consolidated.safetensors": b"-"})
    yield hub
    hub.close()


def resolved(hub: FakeHub, home: Path, model: str, what: str = "weights") -> subprocess.CompletedProcess[str]:
    """A process that resolves the model and prints its path, or ends with what it was refused for."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **hub.environment(home)}
    command = [sys.executable, "-c", RESOLVE, model, what]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_a_cut_connection_is_resumed_where_it_broke_with_lines_of_progress(hub, tmp_path):
    hub.cuts = 1
    done = resolved(hub, tmp_path, "org/tiny")
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert path.name == COMMIT
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert not (path / "consolidated.safetensors").exists(), "it would be a copy"
    assert not (path / "x.gguf").exists(), "only what is served is downloaded"
    assert hub.cuts == 0
    assert hub.sent["model.safetensors"] < 1.6 * len(WEIGHTS), "the second try asked for the rest alone"
    lines = [line for line in done.stderr.splitlines() if line.startswith("downloading org/tiny: ")]
    assert lines
    assert lines[-1].endswith("of 3 MB (100 %)")
    assert "\r" not in done.stderr, "a log gets no bars"


def test_what_is_in_the_cache_is_not_asked_for_again_even_without_a_network(hub, tmp_path):
    first = resolved(hub, tmp_path, "org/tiny")
    sent = hub.sent.copy()
    assert resolved(hub, tmp_path, "org/tiny").stdout == first.stdout
    assert hub.sent == sent
    hub.url = "http://127.0.0.1:9"
    assert resolved(hub, tmp_path, "org/tiny").stdout == first.stdout
    nowhere = resolved(hub, tmp_path, "org/other")
    assert nowhere.returncode == 1
    assert nowhere.stderr.splitlines()[-1].startswith(
        "org/other is neither a local path nor in the Hugging Face cache, and the"
    )


def test_without_weights_none_are_downloaded(hub, tmp_path):
    done = resolved(hub, tmp_path, "org/tiny", "facts")
    assert done.returncode == 0, done.stderr
    assert sorted(hub.sent) == ["config.json", "tokenizer.json"]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("org/gated", "org/gated is gated; accept its terms"),
        ("org/none", "org/none is neither a local path nor a model"),
    ],
)
def test_what_the_hub_refuses_is_one_clear_line(hub, tmp_path, model, words):
    done = resolved(hub, tmp_path, model)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(words)
    assert "Traceback" not in done.stderr


def test_any_other_error_of_the_library_is_translated(monkeypatch):
    import huggingface_hub

    def fail(repo, **settings):
        raise ArithmeticError("odd\nthings")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConfigError, match=r"cannot get org/x .* hub: ArithmeticError: odd; complete files"):
        resolve("org/x")


def test_lines_come_now_and_then(monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr("kvferry.model_files.download.time.monotonic", lambda: now[0])
    bars = download._lines_about("org/x")
    files, content = bars(total=3, desc="Fetching"), bars(total=200e6, unit="B", name="any", desc="bytes")
    with caplog.at_level("INFO", logger="kvferry.models"):
        for second in range(20):
            now[0] = float(second)
            content.update(10e6)
            files.update(1)
    assert caplog.messages == ["downloading org/x: 110 of 200 MB (55 %)"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError("Data processing error: No space left on device (os error 28)"),
    ],
    ids=["plain", "of the library's part in Rust"],
)
def test_a_full_disk_is_told_with_its_place(error, monkeypatch):
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_CACHE

    def fail(repo, **settings):
        raise RuntimeError("a worker failed") from error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConfigError, match=r"org/x does not fit into .*, where \d+ MB are free; .* HF_HOME") as told:
        resolve("org/x")
    assert HF_HUB_CACHE in told.value.message
