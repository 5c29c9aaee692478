"""The demo model as transformers itself loads it from its file, in float32."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import torch

from kvferry.model_files.source import resolve
from tests.once_a_run import RUN


def load_demo(auto: Any = None, **options: Any) -> Any:
    """The model, by transformers' `AutoModelForCausalLM` or another of its classes.

    Reading the file takes ten seconds of CPU time. The first process of a run that does so with these options leaves
    the model to the others."""
    import transformers

    of = auto or transformers.AutoModelForCausalLM
    if not (folder := os.environ.get(RUN)):
        return _read(of, options)
    kept = Path(folder) / f"demo {of.__name__} {sorted(options.items())}.pt"
    if kept.exists():
        return torch.load(kept, weights_only=False, mmap=True)
    model = _read(of, options)
    own = kept.with_suffix(f".{os.getpid()}")
    torch.save(model, own)
    own.replace(kept)
    return model


def _read(of: Any, options: dict[str, Any]) -> Any:
    path = resolve("smollm2").path
    with _read_once():
        return of.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, **options).eval()


@contextmanager
def _read_once() -> Iterator[None]:
    """Keep transformers from parsing the file's vocabulary for each of its steps, and from making the table of all
    tensors' names for each module of the model: most of the time of loading it."""
    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = functools.cache(reader), functools.cache(names)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, names
