"""AMX tiles, real or emulated: rows of every height agree, and a system that refuses tiles gets the next set."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kvferry.kernels.cpu import CpuOps, instruction_sets
from kvferry.kernels.cpu.extension import extension

SETS = instruction_sets()
pytestmark = pytest.mark.skipif("amx" not in SETS, reason="this processor has no AMX tiles, or they are refused")

ROWS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 95, 96, 97)

REFUSING = """
import ctypes, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
load, jump, leave = 0x20, 0x15, 0x06
arch_prctl, request, allow, refuse = 158, 0x1023, 0x7FFF0000, 0x00050001
filter = [(load, 0, 0, 0), (jump, 0, 3, arch_prctl), (load, 0, 0, 16), (jump, 0, 1, request), (leave, 0, 0, refuse),
          (leave, 0, 0, allow)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in filter))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(filter), ctypes.addressof(code)))
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
    sys.exit(77)
import torch
from kvferry.kernels.cpu import CpuOps, instruction_sets
ops = CpuOps(2)
x = torch.ones(3, 64, dtype=torch.bfloat16)
print(ops.instruction_set, *instruction_sets(), int(ops.linear(x)(x)[0, 0]))
"""
"""A process whose kernel answers EPERM to the request for tiles, and does what it is asked otherwise."""

SUMMING = """
import torch
from kvferry.kernels.cpu import CpuOps
random = torch.Generator().manual_seed(0)
layer = CpuOps(2, "amx").linear(torch.randn(64, 130, generator=random).bfloat16())
x = torch.randn(40, 130, generator=random).bfloat16()
whole = layer(x)
print(all(torch.equal(layer(x[:rows]), whole[:rows]) for rows in (1, 2, 3)), whole.double().sum().item())
"""


def output(script: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("this system lets no process filter its calls")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("columns", [2, 30, 32, 34, 130, 576, 1000])
def test_rows_of_every_height_have_the_same_bits(columns: int) -> None:
    """In vectors, in one tile and in four, over whole and broken depths, and in runs of the panel."""
    random = torch.Generator().manual_seed(columns)
    layer = CpuOps(2, "amx").linear(torch.randn(70, columns, generator=random).bfloat16())
    x = torch.randn(193, columns, generator=random).bfloat16()
    whole = layer(x, torch.float32)
    for rows in ROWS:
        assert torch.equal(layer(x[:rows], torch.float32), whole[:rows])
        assert torch.equal(layer(x[193 - rows :], torch.float32), whole[193 - rows :])


def test_denormals_are_zeros_at_every_height() -> None:
    """Of the weights, of products and of sums; they stay numbers for what computes afterwards."""
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(32, 64, generator=random) * 2.0**-70
    weight[:, ::7] = 2.0**-130
    layer = CpuOps(1, "amx").linear(weight.bfloat16())
    x = (torch.randn(40, 64, generator=random) * 2.0**-58).bfloat16()
    whole = layer(x, torch.float32)
    assert torch.equal(layer(x[:1], torch.float32), whole[:1])
    assert whole.abs()[whole != 0].min() >= 2.0**-126
    assert (whole == 0).any()
    assert (torch.full((1,), 2.0**-120) * 2.0**-10).item() == 2.0**-130


def test_a_row_does_not_depend_on_its_batch_in_whatever_order_tiles_sum() -> None:
    """The emulation can sum as Intel's intrinsics guide has it: then a row alone goes through tiles too."""
    manual, guide = output(SUMMING), output(SUMMING, KVFERRY_EMULATED_ORDER="guide")
    assert manual[0] == guide[0] == "True"
    assert float(manual[1]) == pytest.approx(float(guide[1]), rel=1e-2)


def test_a_system_that_refuses_tiles_gets_the_next_set() -> None:
    chosen, *sets, product = output(REFUSING)
    assert sets == [name for name in SETS if name != "amx"]
    assert chosen == sets[0], "on Intel's processors avx512_vnni, on others avx512_bf16"
    assert product == "64"


def test_the_limit_counts_four_tiles_a_round() -> None:
    native = extension()
    assert native is not None
    assert native.Kernels("amx", 3).multiply(5) == 3 * 5 * 4 * (16 * 16 * 32) * 2
