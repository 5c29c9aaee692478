"""Results of production's readers, remembered by the bytes that they read, for mutants that differ in a few bytes."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from kvferry.kernels import ops
from kvferry.kernels.cpu.packed_layers import PackedLinear
from kvferry.kernels.decoder_spec import StoredRows
from kvferry.model_files import source, tokenizer
from kvferry.model_files.gguf import Strings, read_gguf
from kvferry.model_files.source import ModelSource, read_facts, resolve
from kvferry.router.text import loader
from kvferry.router.text.template import ChatTemplate
from kvferry.runtime import limits
from kvferry.structured_output.llguidance_backend import LlguidanceBackend
from kvferry.worker import grammar_masks
from tests.file_mutants import Mutant
from tests.file_parts import tokenizer_key

KEPT = 512
"""Results of one kind that are remembered."""
KEPT_LARGE = 64
"""Tokenizers, and libraries for grammars, which take a MiB each."""


class Remembered:
    """Results of a function by key, the errors that it raised among them; the latest `most`."""

    def __init__(self, most: int = KEPT) -> None:
        self._most = most
        self._kept: OrderedDict[Hashable, tuple[Any, Exception | None]] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The result of this key, made if there is none. Raises what `make` raises or raised."""
        found = self._kept.get(key)
        if found is None:
            try:
                found = make(), None
            except Exception as error:
                found = None, error
            self._kept[key] = found
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        value, error = found
        if error is not None:
            raise error.with_traceback(None)
        return value


class FileMemory:
    """Makes production's readers remember, in this process and for good.

    It replaces readers of files by their contents, and builders of templates, tokenizers, grammar libraries and packed
    weights by their arguments. What this machine has of cores and memory is asked once."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}
        self._sources: dict[tuple[str, bool], ModelSource] = {}
        self._remember_files()
        self._remember_text()
        _remember_machine()
        _remember_weights()

    def begin(self, mutant: Mutant) -> None:
        """From now on, this mutant is on disk."""
        path, files = mutant.path, mutant.files
        single = path.name in files
        self._digests = {str(path if single else path / name): digest for name, digest in files.items()}
        self._sources.clear()

    def _remember_files(self) -> None:
        facts, texts, decode = Remembered(), Remembered(), vars(Strings)["_decoded"].func

        def resolved(model: str, *, weights: bool = True) -> ModelSource:
            if (model, weights) not in self._sources:
                self._sources[model, weights] = resolve(model, weights=weights)
            return self._sources[model, weights]

        def told(found: ModelSource) -> Any:
            names = ("config.json", "generation_config.json") if found.kind == "hf" else ("",)
            key = [self._digest(found.path / name) for name in names]
            return read_facts(found) if None in key else facts.get((found.path, *key), lambda: read_facts(found))

        def decoded(self: Strings) -> Any:
            return texts.get((self._data, len(self)), lambda: decode(self))

        replace_everywhere(read_gguf, self._by_digest(read_gguf))
        replace_everywhere(source._json, self._by_digest(source._json))
        replace_everywhere(resolve, resolved)
        replace_everywhere(read_facts, told)
        replace(Strings, "_decoded", property(decoded))

    def _remember_text(self) -> None:
        templates, tokenizers, libraries = Remembered(), Remembered(KEPT_LARGE), Remembered(KEPT_LARGE)
        read_tokenizer = tokenizer.load_tokenizer

        def template(text: str, special: dict[str, str], *, tool_use: str | None = None) -> Any:
            key = (text, tuple(special.items()), tool_use)
            return templates.get(key, lambda: ChatTemplate(text, special, tool_use=tool_use))

        def vocabulary(found: ModelSource) -> Any:
            if found.kind == "gguf":
                key: Hashable = (found.path, tokenizer_key(found.path))
            else:
                key = self._digest(found.path / "tokenizer.json")
            return read_tokenizer(found) if key is None else tokenizers.get(key, lambda: read_tokenizer(found))

        def library(words: Any) -> Any:
            return libraries.get(words, lambda: LlguidanceBackend(words))

        replace_everywhere(read_tokenizer, vocabulary)
        replace(loader, "ChatTemplate", template)
        replace(grammar_masks, "LlguidanceBackend", library)

    def _by_digest(self, read: Callable[[Path], Any]) -> Callable[[Path], Any]:
        kept = Remembered()

        def remembered(path: Path) -> Any:
            digest = self._digest(path)
            return read(path) if digest is None else kept.get((path, digest), lambda: read(path))

        return remembered

    def _digest(self, path: Path) -> str | None:
        """Of a file of the mutant that is on disk; None of any other file."""
        return self._digests.get(str(path))


def _remember_machine() -> None:
    memory, cores = limits.available_memory(), limits.available_cores()
    chosen = ops.select("auto", torch.device("cpu"))
    replace_everywhere(limits.available_memory, lambda: memory)
    replace_everywhere(limits.available_cores, lambda: cores)
    replace_everywhere(ops.select, lambda *_, **__: chosen)


def _remember_weights() -> None:
    layers, pack_anew = Remembered(), PackedLinear.__init__

    def pack(self: PackedLinear, kernels: Any, parts: Sequence[StoredRows], columns: int, bias: Any) -> None:
        stored = tuple((each.kind, tuple(each.data.shape), xxhash.xxh3_128_digest(_raw(each.data))) for each in parts)
        key = (stored, columns, None if bias is None else _raw(bias.float()))

        def packed() -> Any:
            pack_anew(self, kernels, parts, columns, bias)
            return self.in_features, self.out_features, self.kinds, self.weights

        self.kernels = kernels
        self.in_features, self.out_features, self.kinds, self.weights = layers.get(key, packed)

    replace(PackedLinear, "__init__", pack)


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).reshape(-1).numpy().tobytes()


def replace_everywhere(function: Callable[..., Any], by: Callable[..., Any]) -> None:
    """In all modules of production that are imported; those that import it later find it in its own."""
    for name, module in list(sys.modules.items()):
        if name.startswith("kvferry."):
            for attribute, value in list(vars(module).items()):
                if value is function:
                    replace(module, attribute, by)


def replace(owner: Any, name: str, by: object) -> None:
    """For the rest of this process."""
    setattr(owner, name, by)
