"""What a loaded model keeps in memory beyond its weights: next to nothing."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import torch

from kvferry.engine.models import load_model
from kvferry.engine.models.decoder import Decoder
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
