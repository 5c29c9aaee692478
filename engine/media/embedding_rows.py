"""EmbeddingRows: embeddings of text tokens that lie among an image's tokens, read from the model's checkpoint."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kvferry.model_files.multimodal import text_name
from kvferry.model_files.safetensors_headers import safetensors_header
from kvferry.model_files.source import weight_files
from kvferry.protocol.errors import ConfigError

_TABLE = "model.embed_tokens.weight"
_FLOATS = ("F32", "F16", "BF16")


class EmbeddingRows:
    """Rows of a checkpoint's embedding, each read once. Thread-safe. Raises ConfigError if it has none in floats."""

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype) -> None:
        self._table: Any = _table(path)
        self._device, self._dtype = device, dtype
        self._rows: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    def __getitem__(self, token_id: int) -> torch.Tensor:
        """Return the row [hidden] of a token."""
        with self._lock:
            if token_id not in self._rows:
                self._rows[token_id] = self._table[token_id].to(self._device, self._dtype)
            return self._rows[token_id]


def _table(path: Path) -> Any:
    for file in weight_files(path):
        entries = safetensors_header(file) if file.suffix == ".safetensors" else {}
        for name, (kind, _) in entries.items():
            if text_name(name) == _TABLE and kind in _FLOATS:
                return safe_open(file, framework="pt").get_slice(name)  # type: ignore[no-untyped-call]
    raise ConfigError(f"{path} takes no images: that needs the token embedding as floats in safetensors", param="model")
