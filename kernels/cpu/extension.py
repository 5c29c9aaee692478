"""Access to the compiled CPU extension, which may be absent, and the instruction sets that it runs here."""

from __future__ import annotations

from types import ModuleType


def extension() -> ModuleType | None:
    """Return the compiled extension, or None where it is absent."""
    try:
        from kvferry.kernels.cpu import _native
    except ImportError:
        return None
    module: ModuleType = _native
    return module


def instruction_sets() -> tuple[str, ...]:
    """Return the compiled instruction sets that this processor runs, best first; empty without the extension."""
    native = extension()
    return tuple(native.instruction_sets()) if native is not None else ()


def instruction_set() -> str | None:
    """Return the instruction set that `CpuOps` uses by default; None without the extension."""
    return next(iter(instruction_sets()), None)
