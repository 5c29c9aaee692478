"""Captures decode steps in tests: by CUDA graphs on a GPU; without one by a tape, which repeats what a run did to
tensors, operation by operation and launch by launch, in the same memory. A replay executes no Python of the run, so
what the run read of the host stays what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from kvferry.kernels.cuda_graphs import CudaCapture

T = TypeVar("T")
_launch = InterpretedFunction.run


class Tape(TorchDispatchMode):
    """Records PyTorch's operations and Triton's launches while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], object]] = []
        self._launching = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._launching:
            self.steps.append(lambda: again(func, args, kwargs or {}, out))
        return out

    def launch(self, kernel: Any, *args: Any, **options: Any) -> None:
        self._launching = True
        _launch(kernel, *args, **options)
        self._launching = False
        self.steps.append(lambda: _launch(kernel, *args, **options))

    def replay(self) -> None:
        with torch.inference_mode():
            for step in self.steps:
                step()


def again(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Into the memory of the first result, unless the operation itself writes there or makes a view of it."""
    for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
        if not isinstance(old, torch.Tensor) or old.untyped_storage().data_ptr() == new.untyped_storage().data_ptr():
            continue
        if func.overloadpacket is torch.ops.aten.empty:
            old.fill_(float("nan") if old.is_floating_point() else -7)
        else:
            old.copy_(new)


class Taping:
    """A `kernels.cuda_graphs.Capture`; `sizes`: launches and operations of each recording."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        run()  # as CUDA graphs need it: what it leaves behind must be no part of the recording
        tape = Tape()
        InterpretedFunction.run = lambda kernel, *args, **options: tape.launch(kernel, *args, **options)
        try:
            with tape:
                out = run()
        finally:
            InterpretedFunction.run = _launch
        self.sizes.append(len(tape.steps))
        return tape.replay, out


class CountedGraphs(CudaCapture):
    """CUDA graphs; `sizes` has an entry, 0, for each recording, whose operations nobody counts."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __call__(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        self.sizes.append(0)
        return super().__call__(run)


def capture() -> Taping | CountedGraphs:
    """The capture of this machine: CUDA graphs where there is a GPU."""
    return CountedGraphs() if torch.cuda.is_available() else Taping()
