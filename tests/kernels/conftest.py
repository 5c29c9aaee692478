"""What draws tokens, by each implementation that this machine has."""

from __future__ import annotations

import functools

import pytest

from kvferry.kernels.cpu import CpuOps, instruction_sets
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import ReferenceOps


@functools.cache
def made(name: str) -> Ops:
    return ReferenceOps() if name == "reference" else CpuOps(2, name)


@pytest.fixture(scope="module", params=["reference", *instruction_sets()])
def ops(request: pytest.FixtureRequest) -> Ops:
    return made(request.param)
