"""Loads a model's packed CPU weights once per machine: processes with the same model map one copy."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvferry.kernels.cpu.extension import extension
from kvferry.kernels.cpu.mapped_weights import OtherForm, read, write
from kvferry.protocol.version import VERSION
from kvferry.runtime.shared_file import SharedFile

if TYPE_CHECKING:
    from kvferry.kernels.cpu._native import Kernels

log = logging.getLogger("kvferry.models")

Loaded = TypeVar("Loaded")


def one_copy(descriptor: int, kernels: Kernels, form: str, load: Callable[[], Loaded]) -> Loaded:
    """Load a model whose packed weights all processes share.

    The first process packs into the memory (`shared_file`); all map it if it has this form: the model, and how it is
    packed. If that fails, the weights are this process's own, with a line in the log. Raises what `load` raises."""
    form = f"{form} {VERSION} {_build()}"
    try:
        with contextlib.closing(SharedFile(descriptor)) as memory:
            if memory.take_turn():
                write(memory.writing, kernels, form, load)
                memory.seal()
            reader = memory.reader()
            try:
                return read(reader, kernels, form)  # type: ignore[no-any-return]
            finally:
                os.close(reader)
    except OtherForm:
        why = "the other processes have another model or another packing"
    except (OSError, MemoryError) as error:
        why = str(error) or "out of memory"
    kernels.pack_into(-1)
    log.info("weights are not shared with other processes: %s", why)
    return load()


def _build() -> int:
    """Return the build of the extension, which decides the layout of panels."""
    path = getattr(extension(), "__file__", None)
    return Path(path).stat().st_mtime_ns if path else 0
