"""NVIDIA's aiperf: a load of exact lengths, streamed and not. It takes its tokenizer from the hub's cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import MODEL, URL, check

AIPERF = Path(sys.executable).with_name("aiperf")


def cached_tokenizer(home):
    """A hub cache that holds the demo model's tokenizer as local/demo."""
    repository = Path(home, "hub", "models--local--demo")
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0")
    shutil.copytree(os.environ["CHECK_TOKENIZER"], repository / "snapshots" / "0")
    return {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}


def profile(*more):
    """What aiperf exports after a run of six requests, two at a time."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(AIPERF), "profile", "--model", MODEL, "--url", URL, "--endpoint-type", "chat", "--artifact-dir", folder,
            "--tokenizer", "local/demo", "--no-gpu-telemetry", "--use-server-token-count", "--ui", "none",
            "--request-count", "6", "--concurrency", "2", "--synthetic-input-tokens-mean", "60",
            "--output-tokens-mean", "16", "--extra-inputs", "ignore_eos:true", *more,
        ]  # fmt: skip
        env = cached_tokenizer(Path(folder, "home"))
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=env, cwd=folder)
        assert done.returncode == 0, (done.stdout + done.stderr)[-800:]
        (export,) = Path(folder).rglob("profile_export_aiperf.json")
        return json.loads(export.read_text())


@check
def whole_answers():
    found = profile()
    assert found["request_count"]["avg"] == 6
    assert not found["error_summary"]
    assert found["output_sequence_length"]["avg"] == 16


@check
def streams():
    found = profile("--streaming")
    assert found["request_count"]["avg"] == 6
    assert found["output_sequence_length"]["min"] == found["output_sequence_length"]["max"] == 16
    assert found["time_to_first_token"]["avg"] > 0
    assert found["inter_token_latency"]["avg"] > 0
