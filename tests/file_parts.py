"""What each part of the reading can see of a mutant's files, as keys of what is remembered."""

from __future__ import annotations

import marshal
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from kvferry.model_files import gguf, source
from kvferry.model_files.source import ModelSource
from kvferry.protocol.errors import ConfigError
from tests.file_mutants import Mutant

TEXT_ONLY = ("tokenizer.chat_template", "tokenizer.ggml.")
"""Fields of a GGUF that are about text: workers read them for grammars, and the numbers of ending tokens."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Keys of four parts of the reading. A part comes out the same for two mutants with the same key of it.

    needs: what `kvferry doctor` computes. text: a router's reading. masks: a worker's of the tokenizer. serve: the rest
    of a worker's."""

    needs: Hashable
    text: Hashable
    masks: Hashable
    serve: Hashable

    @classmethod
    def of(cls, mutant: Mutant) -> Parts:
        return _of_file(mutant) if mutant.path.is_file() else _of_directory(mutant)


def _of_file(mutant: Mutant) -> Parts:
    (digest,) = mutant.files.values()
    try:
        found = gguf.read_gguf(mutant.path)
    except ConfigError as error:  # all readers begin with the header, and this is what they say
        return Parts(*[("refused", error.message)] * 4)
    start = min((tensor.offset for tensor in found.tensors.values()), default=0)
    size = mutant.path.stat().st_size
    if not found.tensors or start > size:
        return Parts(*[digest] * 4)
    with mutant.path.open("rb") as file:
        file.seek(start)
        data = xxhash.xxh3_128_hexdigest(file.read())
    text = {name: value for name, value in found.metadata.items() if name.startswith(TEXT_ONLY)}
    template = {name: text.pop(name) for name in list(text) if name.startswith("tokenizer.chat_template")}
    rest = {name: value for name, value in found.metadata.items() if not name.startswith(TEXT_ONLY)}
    tensors = [(each.name, each.shape, each.type, each.offset, each.part) for each in found.tensors.values()]
    table = _digest((_plain(rest), size, start, tensors))
    of_text, facts = _digest(_plain(text)), _facts(ModelSource("gguf", mutant.path, mutant.path.stem, ""))
    return Parts(
        ("gguf", table, facts),
        ("gguf", table, of_text, _digest(_plain(template))),
        ("gguf", table, of_text),
        ("gguf", table, facts, data),
    )


def _of_directory(mutant: Mutant) -> Parts:
    """All that a worker reads of generation_config.json, `read_facts` returns."""
    files = mutant.files
    config, weights, tokenizer = (files[name] for name in ("config.json", "model.safetensors", "tokenizer.json"))
    template = (files["tokenizer_config.json"], files.get("chat_template.jinja"))
    facts = _facts(ModelSource("hf", mutant.path, mutant.path.name, ""))
    return Parts(
        (config, facts, weights),
        (config, files["generation_config.json"], tokenizer, template),
        (config, facts, tokenizer),
        (config, facts, weights),
    )


def _facts(found: ModelSource) -> str:
    """As `read_facts` tells them, or what it refuses them with; without the sampling, which routers alone read."""
    try:
        return repr(replace(source.read_facts(found), sampling=()))
    except ConfigError as error:
        return error.message


def _plain(fields: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value._data if isinstance(value, gguf.Strings) else value) for name, value in fields.items()]


def _digest(value: Any) -> bytes:
    return xxhash.xxh3_128_digest(marshal.dumps(value, 2))  # the version without references to equal objects


def tokenizer_key(path: Path) -> bytes:
    """Of the fields that a GGUF's tokenizer is built from. Raises ConfigError."""
    metadata = gguf.read_gguf(path).metadata
    return _digest(_plain({name: value for name, value in metadata.items() if name.startswith("tokenizer.ggml.")}))
