"""Models whose files ask a worker for more than their weights have: refused before memory is taken for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.engine.models import load_model
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError
from tests.file_mutants import metadata, write_directory, write_gguf

CPU = torch.device("cpu")


def load(path: Path) -> object:
    return load_model(resolve(str(path)), device=CPU, dtype=torch.float32, ops=ReferenceOps(), impl="kvferry")


@pytest.mark.parametrize("factor", [2.0**31, 1.5, -1.0, float("nan")])
def test_rotary_dimensions_that_a_head_does_not_have_are_refused(tmp_path: Path, factor: float) -> None:
    """Frequencies of 2^32 dimensions took half a minute and tens of GiB."""
    path = write_directory(tmp_path / "odd")
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"partial_rotary_factor": factor}))
    with pytest.raises(ConfigError, match="odd: rope: partial_rotary_factor must be above 0 and at most 1, got"):
        load(path)


@pytest.mark.parametrize("name", ["head_dim", "num_key_value_heads"])
def test_sizes_that_are_no_numbers_are_refused(tmp_path: Path, name: str) -> None:
    """A text times the number of heads is a text, of GiB."""
    path = write_directory(tmp_path / "odd")
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {name: "x", "num_attention_heads": 2**31}))
    with pytest.raises(ConfigError, match=f"odd: config.json: {name} must be a whole number of at least 1, got 'x'"):
        load(path)


@pytest.mark.parametrize(("context", "words"), [(1, "a context of 1 tokens"), (2**32 - 1, "the limit is 8388608")])
def test_a_worker_refuses_the_contexts_that_a_router_refuses(tmp_path: Path, context: int, words: str) -> None:
    """It took tables of four billion positions for the second."""
    path = write_gguf(tmp_path / "odd.gguf", metadata())
    key = b"llama.context_length"
    data = path.read_bytes()
    place = data.index(key) + len(key) + 4
    path.write_bytes(data[:place] + context.to_bytes(4, "little") + data[place + 4 :])
    with pytest.raises(ConfigError, match=f"odd has .*{words}"):
        load(path)


def test_tables_of_positions_take_memory_once_sequences_reach_them_and_little_more_than_their_size() -> None:
    """A context of millions of tokens took GiB at the start, whatever the pool could hold."""
    code = """
import resource, torch
from kvferry.engine.models.rope import RopeTables
from kvferry.engine.models.rope_config import RopeConfig
cpu, peak = torch.device("cpu"), lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
config = RopeConfig(theta=10000.0, dim=32, original_max_len=4096)
RopeTables(config, 4096, cpu).grow_to(4096)
before = peak()
tables = RopeTables(config, 1 << 21, cpu)
made = peak()
tables.grow_to(1 << 21)
size = tables.cos.nbytes + tables.sin.nbytes
print((made - before) / size, (peak() - before) / size)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    made, full = map(float, done.stdout.split())
    assert made < 0.1
    assert full < 1.4
