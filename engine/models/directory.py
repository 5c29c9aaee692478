"""Weights of a directory in Hugging Face's layout: safetensors or pytorch_model*.bin, plain or quantised."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from kvferry.engine.models.quantised import QuantisedWeights
from kvferry.engine.models.weights import PlainWeights, check_shape, missing
from kvferry.model_files.multimodal import text_name
from kvferry.model_files.quantisation import Quantisation
from kvferry.model_files.source import weight_files
from kvferry.protocol.errors import ConfigError


def open_directory(
    path: Path, quantised: Quantisation | None = None, renamed: Callable[[str], str] = text_name
) -> FileWeights | QuantisedWeights:
    """Open its safetensors, or else its pytorch_model*.bin. quantised: how, if its config says so.

    renamed: gives each tensor's name for readers. Without it the text's tensors of a multimodal checkpoint get the
    names of a text-only one."""
    files = weight_files(path)
    safe = files and files[0].suffix == ".safetensors"
    tensors = SafetensorsWeights(files, renamed) if safe else TorchWeights(files, renamed)
    return tensors if quantised is None else QuantisedWeights(tensors, quantised)


class FileWeights(PlainWeights):
    """Weights in files of whole tensors. Implements `engine.models.weights.Weights`."""

    def find(self, name: str) -> torch.Tensor | None:
        """Return the tensor as stored; None: there is none of that name."""
        raise NotImplementedError

    def holds(self, name: str) -> bool:
        raise NotImplementedError

    def names(self) -> Iterable[str]:
        raise NotImplementedError

    def read(self, name: str, out: torch.Tensor) -> None:
        tensor = self.find(name)
        if tensor is None:
            tensor = self._of_parts(name, len(out) if out.dim() > 1 else 0)
        check_shape(name, tuple(tensor.shape), tuple(out.shape))
        out.copy_(tensor)

    def _of_parts(self, name: str, count: int) -> torch.Tensor:
        """Return a tensor that a checkpoint stores as numbered parts, as StableLM's norms of heads, joined together."""
        stem, _, kind = name.rpartition(".")
        parts = (self.find(f"{stem}.{index}.{kind}") for index in range(count))
        found = [part for part in itertools.takewhile(lambda part: part is not None, parts) if part is not None]
        if not found:
            raise missing(name)
        return torch.stack(found)


class SafetensorsWeights(FileWeights):
    """Memory-mapped .safetensors files; each shard's own header lists its tensors. Implements `FileWeights`."""

    def __init__(self, files: list[Path], renamed: Callable[[str], str] = text_name):
        from safetensors import SafetensorError, safe_open

        self._handles: dict[str, tuple[Any, str]] = {}
        for file in files:
            try:
                handle: Any = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"cannot read {file}: {error}; download it again", param="model") from error
            self._handles.update({renamed(name): (handle, name) for name in handle.keys()})  # noqa: SIM118

    def find(self, name: str) -> torch.Tensor | None:
        if name not in self._handles:
            return None
        handle, stored = self._handles[name]
        tensor: torch.Tensor = handle.get_tensor(stored)
        return tensor

    def holds(self, name: str) -> bool:
        return name in self._handles

    def names(self) -> Iterable[str]:
        return self._handles


class TorchWeights(FileWeights):
    """Read pytorch_model*.bin files without running code from them. Implements `FileWeights`."""

    def __init__(self, files: list[Path], renamed: Callable[[str], str] = text_name):
        self._tensors: dict[str, torch.Tensor] = {}
        for file in files:
            try:
                tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
                self._tensors.update({renamed(name): tensor for name, tensor in tensors.items()})
            except (OSError, RuntimeError, ValueError, EOFError) as error:
                reason = next(iter(str(error).splitlines()), type(error).__name__)
                raise ConfigError(f"cannot read {file}: {reason}", param="model") from error

    def find(self, name: str) -> torch.Tensor | None:
        return self._tensors.get(name)

    def holds(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> Iterable[str]:
        return self._tensors
