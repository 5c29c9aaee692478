"""Subjects of the kernel benchmark: products with weights in codes, against PyTorch's with the same weights in 16
bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.gpu_subject import Shape, Subject, layers_for
from kernels.codes import Codes
from kernels.ops import Ops

GROUP = 128
FORMS = ("int4", "int4, zero points", "int8", "fp8")
"""In groups of 128, two of them; an output; and blocks of 128 x 128."""


def product(ops: Ops, shape: Shape, form: str, rows: int) -> Subject:
    """Of so many rows with layers of hidden inputs and four times as many outputs."""
    inputs = shape.heads * shape.dim
    outputs = 4 * inputs
    codes = codes_of(form, outputs, inputs, shape.device)
    stored = sum(part.nbytes for part in (codes.values, codes.scales))
    if form.startswith("int4"):
        stored = outputs * (inputs // 2 + inputs // GROUP * (2 if form == "int4" else 4))
    moved = stored + rows * (inputs + outputs) * shape.dtype.itemsize
    layers = layers_for(moved)
    each = [codes_of(form, outputs, inputs, shape.device, seed) for seed in range(layers)]
    weights = [torch.empty(outputs, inputs, dtype=shape.dtype, device=shape.device) for _ in each]
    for one, weight in zip(each, weights, strict=True):
        one.write(weight)
    linears = [ops.packed([one], inputs) or ops.linear(weight) for one, weight in zip(each, weights, strict=True)]
    x = torch.randn(rows, inputs, dtype=shape.dtype, device=shape.device)
    return Subject(
        f"product {rows} x {outputs}, {form}",
        lambda layer: linears[layer](x),
        lambda layer: F.linear(x, weights[layer]),
        layers,
        moved,
        2 * rows * outputs * inputs,
    )


def codes_of(form: str, outputs: int, inputs: int, device: torch.device, seed: int = 0) -> Codes:
    """Random ones; sums of their products with numbers of standard deviation 1 have about that, too."""
    random, groups = torch.Generator(device).manual_seed(seed), -(-inputs // GROUP)
    low, high = (-127, 127) if form == "int8" else (-8, 7)
    values = torch.randint(low, high + 1, (outputs, inputs), generator=random, dtype=torch.int8, device=device)
    size = (high / 3**0.5) * inputs**0.5
    if form == "int8":
        return Codes(values, torch.full((outputs, 1), 1 / size, device=device))
    if form == "fp8":
        scales = torch.full((-(-outputs // GROUP), groups), 1 / size, device=device)
        return Codes(values.to(torch.float8_e4m3fn), scales, (GROUP, GROUP))
    scales = torch.full((outputs, groups), 1 / size, device=device).half().float()
    if form != "int4":
        values.view(outputs, groups, -1).add_(torch.arange(groups, dtype=torch.int8, device=device)[:, None] % 3)
    return Codes(values, scales)
