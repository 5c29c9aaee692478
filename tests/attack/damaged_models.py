"""Models as someone may hand them over who wants the operator's processes to hang, crash, or fill the memory."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from tests.file_mutants import metadata, write_directory, write_gguf

WHOLE_DIRECTORY, WHOLE_GGUF = "whole", "whole.gguf"


def whole(home: Path) -> None:
    """One model that is right in both layouts: what the damaged ones are made of."""
    write_directory(home / WHOLE_DIRECTORY)
    write_gguf(home / WHOLE_GGUF, metadata())


def _directory(home: Path, name: str) -> Path:
    return Path(shutil.copytree(home / WHOLE_DIRECTORY, home / name))


def _gguf(home: Path) -> bytearray:
    return bytearray((home / WHOLE_GGUF).read_bytes())


def _config(home: Path, name: str, text: str) -> Path:
    path = _directory(home, name)
    (path / "config.json").write_text(text)
    return path


def _changed(home: Path, name: str, **fields: object) -> Path:
    known = json.loads((home / WHOLE_DIRECTORY / "config.json").read_text())
    return _config(home, name, json.dumps(known | fields))


def _file(home: Path, name: str, data: bytes | bytearray) -> Path:
    (home / f"{name}.gguf").write_bytes(data)
    return home / f"{name}.gguf"


def _with_pipe(home: Path, name: str, file: str) -> Path:
    path = _directory(home, name)
    (path / file).unlink()
    os.mkfifo(path / file)
    return path


def pipe_for_a_file(home: Path, name: str) -> Path:
    """Whoever opens it waits for a writer that never comes."""
    os.mkfifo(home / f"{name}.gguf")
    return home / f"{name}.gguf"


def pipe_for_weights(home: Path, name: str) -> Path:
    return _with_pipe(home, name, "model.safetensors")


def pipe_for_a_config(home: Path, name: str) -> Path:
    return _with_pipe(home, name, "config.json")


def pipe_for_a_tokenizer(home: Path, name: str) -> Path:
    return _with_pipe(home, name, "tokenizer.json")


def endless_file(home: Path, name: str) -> Path:
    """A link to a device that never ends."""
    (home / f"{name}.gguf").symlink_to("/dev/zero")
    return home / f"{name}.gguf"


def endless_config(home: Path, name: str) -> Path:
    path = _directory(home, name)
    (path / "config.json").unlink()
    (path / "config.json").symlink_to("/dev/zero")
    return path


def link_to_itself(home: Path, name: str) -> Path:
    (home / f"{name}.gguf").symlink_to(home / f"{name}.gguf")
    return home / f"{name}.gguf"


def empty_file(home: Path, name: str) -> Path:
    return _file(home, name, b"")


def half_a_file(home: Path, name: str) -> Path:
    data = _gguf(home)
    return _file(home, name, data[: len(data) // 2])


def promised_tensors(home: Path, name: str) -> Path:
    """A header that promises 2^63 tensors."""
    data = _gguf(home)
    data[8:16] = struct.pack("<Q", 1 << 63)
    return _file(home, name, data)


def sparse_file(home: Path, name: str) -> Path:
    """Four terabytes of zeros behind a right header."""
    path = _file(home, name, _gguf(home))
    with path.open("r+b") as file:
        file.truncate(4 << 40)
    return path


def deep_config(home: Path, name: str) -> Path:
    return _config(home, name, '{"a":' * 100_000)


def no_config(home: Path, name: str) -> Path:
    path = _directory(home, name)
    (path / "config.json").unlink()
    return path


def vast_layers(home: Path, name: str) -> Path:
    return _changed(home, name, num_hidden_layers=10**9)


def vast_width(home: Path, name: str) -> Path:
    return _changed(home, name, hidden_size=2**40, intermediate_size=2**41)


def no_heads(home: Path, name: str) -> Path:
    return _changed(home, name, num_attention_heads=0, num_key_value_heads=0)


def code_of_its_own(home: Path, name: str) -> Path:
    """Code that would leave a file behind if it ever ran."""
    path = _changed(
        home, name, model_type="own", architectures=["Own"],
        auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"},
    )  # fmt: skip
    (path / "own.py").write_text(f"open({str(home / 'ran')!r}, 'w')\nclass Own: pass\n")
    return path


def pickled_weights(home: Path, name: str) -> Path:
    """A pickle that would leave a file behind if it were ever loaded."""
    path = _directory(home, name)
    (path / "model.safetensors").unlink()
    ran = str(home / "ran").encode()
    (path / "pytorch_model.bin").write_bytes(b"cbuiltins\nopen\n(V" + ran + b"\nVw\ntR.")
    return path


def weights_elsewhere(home: Path, name: str) -> Path:
    """An index that names files outside of the directory."""
    path = _directory(home, name)
    (path / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "../../../../../etc/passwd"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def long_header(home: Path, name: str) -> Path:
    path = _directory(home, name)
    (path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    return path


def broken_tokenizer(home: Path, name: str) -> Path:
    path = _directory(home, name)
    (path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE", "vocab": 5, "merges": {}}}')
    return path


def deep_tokenizer(home: Path, name: str) -> Path:
    path = _directory(home, name)
    (path / "tokenizer.json").write_text("[" * 200_000)
    return path


Damage = Callable[[Path, str], Path]
FEW: tuple[Damage, ...] = (
    pipe_for_a_file, pipe_for_weights, endless_file, sparse_file, promised_tensors, deep_config, vast_layers,
    half_a_file,
)  # fmt: skip
ALL: tuple[Damage, ...] = (
    *FEW, pipe_for_a_config, pipe_for_a_tokenizer, endless_config, link_to_itself, empty_file, no_config, vast_width,
    no_heads, code_of_its_own, pickled_weights, weights_elsewhere, long_header, broken_tokenizer, deep_tokenizer,
)  # fmt: skip
