"""The demo model as transformers itself loads it from its file, in float32."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gguf
import torch

from kvferry.model_files.source import resolve


def load_demo(auto: Any = None, **options: Any) -> Any:
    """The model, by transformers' `AutoModelForCausalLM` or another of its classes."""
    import transformers

    path = resolve("smollm2").path
    with _read_once():
        model = (auto or transformers.AutoModelForCausalLM).from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, **options
        )
    return model.eval()


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
