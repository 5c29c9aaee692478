"""Writes packed CPU weights to a file, and maps that file in other processes, which share one copy.

The file holds the packed panels, then everything else pickled, then a description of its form, then the sizes of the
three."""

from __future__ import annotations

import gc
import io
import os
import pickle
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvferry.kernels.cpu.packed_layers import PackedLinear

if TYPE_CHECKING:
    from kvferry.kernels.cpu._native import Kernels, Place

_SIZES = struct.Struct("<QQQ")


class OtherForm(Exception):
    """The weight file has another form than requested."""


def write(descriptor: int, kernels: Kernels, form: str, make: Callable[[], object]) -> None:
    """Fill the empty file with the value of `make`, whose layers these kernels pack.

    form: the description that `read` must ask for. Raises OSError or MemoryError if there is not enough space."""
    kernels.pack_into(descriptor)
    try:
        rest = io.BytesIO()
        _Pickler(rest, pickle.HIGHEST_PROTOCOL).dump(make())
        gc.collect()  # reference cycles in the value would keep the file open for writing
        panels = kernels.finish()
    finally:
        kernels.pack_into(-1)
    pickled, named = rest.tell(), form.encode()
    rest.write(named + _SIZES.pack(panels, pickled, len(named)))
    left, at = memoryview(rest.getbuffer()), panels
    while left:
        written = os.pwrite(descriptor, left, at)
        left, at = left[written:], at + written


def read(descriptor: int, kernels: Kernels, form: str) -> Any:
    """Map the layers of a file that `write` wrote.

    The file must come from this program: it is unpickled. Raises OtherForm before anything is mapped; OSError and
    MemoryError."""
    end = os.fstat(descriptor).st_size - _SIZES.size
    panels, pickled, named = _SIZES.unpack(os.pread(descriptor, _SIZES.size, end))
    if os.pread(descriptor, named, panels + pickled) != form.encode():
        raise OtherForm
    if panels:
        kernels.map(descriptor, panels)
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(panels)
        return _Unpickler(io.BytesIO(file.read(pickled)), kernels).load()


class _Pickler(pickle.Pickler):
    def persistent_id(self, each: object) -> Place | None:
        return each.kernels.place(each.weights) if isinstance(each, PackedLinear) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, kernels: Kernels) -> None:
        super().__init__(file)
        self._kernels = kernels

    def persistent_load(self, place: Place) -> PackedLinear:
        return PackedLinear.placed(self._kernels, place)
