"""What a loaded model keeps in memory beyond its weights: next to nothing."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import torch

from kvferry.engine.models import load_model, rope
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.models.rope import ROWS_AT_ONCE, RopeTables
from kvferry.engine.models.rope_config import RopeConfig
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.source import resolve
from tests.engine.tiny_models import chunked_logits, family, save_tiny, tokens_for

MEASURE = """
import ctypes, pathlib, re, torch
from kvferry.engine.models import load_model
from kvferry.kernels.ops import select
from kvferry.model_files.source import resolve

def resident():
    return int(re.search(r"RssAnon:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])

cpu = torch.device("cpu")
model = load_model(resolve("smollm2"), device=cpu, dtype=None, ops=select("auto", cpu), quantization="auto")
loaded = resident()
ctypes.CDLL(None).malloc_trim(0)
print(loaded - resident())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_what_loading_freed_is_the_systems_again() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) < 8 * 1024, "KiB that a second trim gives back"


def test_rope_tables_grow_to_what_sequences_need() -> None:
    """In runs of rows that lie where they lie for all, so that nodes agree bit by bit."""
    config, length, cpu = RopeConfig(10000.0, 8, 4096), 2 * ROWS_AT_ONCE + 100, torch.device("cpu")
    angles = torch.outer(torch.arange(length, dtype=torch.float64), 10000.0 ** -(torch.arange(0, 8, 2).double() / 8))
    grown, whole = RopeTables(config, length, cpu), RopeTables(config, length, cpu)
    whole.grow_to(length + 1)
    for reached in (5, ROWS_AT_ONCE + 1, 7, length):
        grown.grow_to(reached)
        assert torch.equal(grown.cos[:reached], whole.cos[:reached])
        assert torch.equal(grown.sin[:reached], whole.sin[:reached])
    torch.testing.assert_close(whole.cos.double(), angles.cos(), atol=1e-2, rtol=0)
    torch.testing.assert_close(whole.sin.double(), angles.sin(), atol=1e-2, rtol=0)


def test_a_prompt_longer_than_a_run_of_rows_is_rotated(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(family("LlamaConfig"), tmp_path)
    source, cpu, tokens = resolve(str(tmp_path)), torch.device("cpu"), tokens_for(60)
    wanted = chunked_logits(load_model(source, device=cpu, dtype=torch.float32, ops=ReferenceOps()), tokens, [60])
    monkeypatch.setattr(rope, "ROWS_AT_ONCE", 8)
    model = load_model(source, device=cpu, dtype=torch.float32, ops=ReferenceOps())
    torch.testing.assert_close(chunked_logits(model, tokens, [9, 30, 21]), wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(("asked", "rows"), [(0, 128), (40, 40), (128, 128), (500, 128)])
def test_rope_tables_are_as_long_as_sequences_may_be(tmp_path, asked: int, rows: int) -> None:
    save_tiny(family("LlamaConfig"), tmp_path)
    source, cpu = resolve(str(tmp_path)), torch.device("cpu")
    whole = load_model(source, device=cpu, dtype=torch.float32, ops=ReferenceOps())
    model = load_model(source, device=cpu, dtype=torch.float32, ops=ReferenceOps(), max_model_len=asked)
    assert isinstance(model, Decoder)
    assert (*map(len, model._rotations.rope), model.info.max_model_len) == (rows, rows, 128)
    tokens = tokens_for(min(rows, 60))
    assert torch.equal(chunked_logits(model, tokens, [len(tokens)]), chunked_logits(whole, tokens, [len(tokens)]))
