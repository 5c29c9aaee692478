"""Parser of a GGUF file's header (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): metadata, tensors.

The reader of the `gguf` package makes one numpy view per vocabulary entry, seconds for a large vocabulary; this one
decodes the same header in tens of milliseconds, so that a router can afford it.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, overload

from kvferry.protocol.errors import ConfigError

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
MAX_NESTING, MAX_DIMS = 4, 8
"""Maximum levels of arrays in arrays, and maximum dimensions of a tensor; ggml itself allows four."""
MAX_NUMBERS = 1 << 24
"""Maximum number of entries of an array of numbers: four times the largest vocabulary supported."""
MAX_ALIGNMENT = 1 << 20
"""Maximum alignment of tensors, in bytes; files use 32."""
LARGEST_WEIGHT, MAX_PADDING = 8, 1 << 20
"""Bytes of a weight in ggml's largest format, and maximum bytes after the tensors: files are read whole."""
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of the table.

    shape: outermost dimension first (rows of a matrix = output features). type: ggml's number of the quantisation.
    offset: in bytes from the start of its file, which is `GGUFFile.parts[part]`."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """Parsed header of a GGUF file, or of all parts of a split file.

    metadata: Python scalars, strings, lists and `Strings`; of a split file, those of its first part. tensors: by name,
    in file order."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    parts: tuple[Path, ...]

    @property
    def architecture(self) -> str:
        """Architecture of the model, such as `llama`; empty if the file names none."""
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of one of the architecture's own keys: `get("block_count")` reads `llama.block_count`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def read_gguf(path: Path) -> GGUFFile:
    """Parse the header; if `path` is any part of a split file, those of all parts.

    Raises ConfigError if a file is unreadable, no GGUF, of a version other than 2 and 3, big-endian or truncated, or if
    a part is missing."""
    parts = gguf_parts(path)
    headers = [_read(part) for part in parts]
    first, count = headers[0], headers[0].metadata.get("split.count", 1)
    if not isinstance(count, int):
        raise ConfigError(f"{path} is invalid: split.count must be a whole number, got {count!r:.40}", param="model")
    if count != len(parts) and count > 1:
        raise ConfigError(
            f"{path} is one of {count} parts of a split GGUF; rename the files as llama-gguf-split does, "
            f"{path.stem}-00001-of-{count:05}.gguf and so on",
            param="model",
        )
    tensors = {
        name: replace(tensor, part=index)
        for index, header in enumerate(headers)
        for name, tensor in header.tensors.items()
    }
    return replace(first, path=path, tensors=tensors, parts=parts)


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """Return the files of a GGUF of which `path` is one, in order."""
    named = _PART.fullmatch(path.name)
    if named is None:
        return (path,)
    count = int(named[3])
    return tuple(path.with_name(f"{named[1]}-{index:05}-of-{named[3]}.gguf") for index in range(1, count + 1))


def gguf_stem(path: Path) -> str:
    """Return the file's name without the number of its part."""
    named = _PART.fullmatch(path.name)
    return path.stem if named is None else named[1]


def _read(path: Path) -> GGUFFile:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data).header(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", param="model") from error
    except Exception as error:  # whatever a damaged or hostile header leads to
        raise ConfigError(f"{path} is not a valid GGUF file ({error}); download it again", param="model") from error


class Strings(Sequence[str]):
    """Array of strings that is decoded on first access: a worker never reads the hundred thousand of a vocabulary.

    `data` holds each string's length (uint64) and its bytes, one after the other."""

    def __init__(self, data: bytes, length: int) -> None:
        self._data, self._length = data, length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._decoded[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded)

    def __eq__(self, other: object) -> bool:
        return self._decoded == other if isinstance(other, list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"an array of {self._length} texts"

    @cached_property
    def _decoded(self) -> list[str]:
        data, at, size, found = self._data, 0, struct.Struct("<Q").unpack_from, []
        for _ in range(self._length):
            end = at + 8 + size(data, at)[0]
            found.append(data[at + 8 : end].decode("utf-8", "replace"))
            at = end
        return found


class _Cursor:
    """Reader of a header's fields in order. Raises struct.error or ValueError if the data ends or is invalid."""

    def __init__(self, data: mmap.mmap):
        self._data = data
        self._at = 0

    def header(self, path: Path) -> GGUFFile:
        if self._bytes(4) != MAGIC:
            raise ValueError("wrong magic")
        version, tensor_count, field_count = self._unpack("<IQQ")
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version}, supported: 2 and 3 in little-endian order")
        metadata = {}
        for _ in range(field_count):
            key = self._string()
            metadata[key] = self._value(self._unpack("<I")[0])
        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT:
            raise ValueError(f"general.alignment must be 1 to {MAX_ALIGNMENT}, got {alignment!r:.40}")
        start = -(-self._at // alignment) * alignment
        tensors = {name: GGUFTensor(name, shape, kind, start + offset) for name, shape, kind, offset in infos}
        ends = (tensor.offset + LARGEST_WEIGHT * math.prod(tensor.shape) for tensor in tensors.values())
        if (more := len(self._data) - max(ends, default=start)) > MAX_PADDING:
            raise ValueError(f"it has {more} bytes or more after its tensors")
        return GGUFFile(path, metadata, tensors, (path,))

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return values

    def _bytes(self, length: int) -> bytes:
        end = self._at + length
        if end > len(self._data):
            raise ValueError("it ends inside its header")
        found = self._data[self._at : end]
        self._at = end
        return found

    def _string(self) -> str:
        return self._bytes(self._unpack("<Q")[0]).decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise ValueError(f"a value has the unknown type {kind}")
        return self._unpack("<" + _SCALARS[kind])[0]

    def _array(self, level: int = 1) -> Sequence[Any]:
        kind, length = self._unpack("<IQ")
        if kind == STRING:
            return self._strings(length)
        if kind == ARRAY:
            if level == MAX_NESTING:
                raise ValueError(f"arrays are nested deeper than {MAX_NESTING}")
            return [self._array(level + 1) for _ in range(length)]
        if length > MAX_NUMBERS:
            raise ValueError(f"an array has {length} numbers; the limit is {MAX_NUMBERS}")
        code = _SCALARS[kind]
        raw = self._bytes(length * struct.calcsize("<" + code))
        return [value for (value,) in struct.iter_unpack("<" + code, raw)]

    def _strings(self, length: int) -> Strings:
        data, at, size = self._data, self._at, struct.Struct("<Q").unpack_from
        for _ in range(length):
            at += 8 + size(data, at)[0]
        return Strings(self._bytes(at - self._at), length)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (dims,) = self._unpack("<I")
        if dims > MAX_DIMS:
            raise ValueError(f"a tensor has {dims} dimensions; the limit is {MAX_DIMS}")
        shape = self._unpack(f"<{dims}Q")
        kind, offset = self._unpack("<IQ")
        return name, shape[::-1], kind, offset
