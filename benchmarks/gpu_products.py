"""Subjects of the GPU kernel benchmark: products with quantised weights, against PyTorch's products in 16 bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.gpu_subject import Shape, Subject, layers_for
from kvferry.kernels.decoder_spec import Stored, StoredRows
from kvferry.kernels.gguf_blocks import FORMATS
from kvferry.kernels.gpu_weight_layout import form_of_stored
from kvferry.kernels.ops import Ops
from kvferry.kernels.quantised_codes import Codes

GROUP, RUN = 128, 32
"""Inputs per scale: of integers, and of MXFP4."""
HALVES = {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
"""Block formats of GGUF, and the bytes of a block at which its float16 numbers are."""
FORMS = ("int4", "int4, zero points", "int8", "fp8", *HALVES, "MXFP4")
"""Two forms of int4 in groups of 128; int8 per output; fp8 in blocks of 128 x 128; then GGUF's blocks, and MXFP4."""
_DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
"""Numbers of e2m1, doubled."""


def product(ops: Ops, shape: Shape, form: str, rows: int) -> Subject:
    """Return a product of `rows` rows with layers of hidden inputs and four times as many outputs."""
    inputs = shape.heads * shape.dim
    outputs = 4 * inputs
    sample = form_of_stored(stored(form, outputs, inputs, shape.device))
    assert sample is not None
    moved = sample.memory + rows * (inputs + outputs) * shape.dtype.itemsize
    layers = layers_for(moved)
    each = [stored(form, outputs, inputs, shape.device, seed) for seed in range(layers)]
    weights = [weight_of(one, inputs).to(shape.dtype) for one in each]
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


def stored(form: str, outputs: int, inputs: int, device: torch.device, seed: int = 0) -> Stored:
    """Return random weights; products with numbers of standard deviation 1 have a standard deviation of about 1."""
    random = torch.Generator(device).manual_seed(seed)
    if form in HALVES:
        return _blocks(form, outputs, inputs, random)
    return _mxfp4(outputs, inputs, random) if form == "MXFP4" else _integers(form, outputs, inputs, random)


def weight_of(part: Stored, inputs: int) -> torch.Tensor:
    """Return the weight as float32 [out, in]."""
    if isinstance(part, Codes):
        return part.weights(0, len(part.values))
    form = FORMATS[part.kind]
    return form.values(part.data.view(-1, form.bytes)).view(-1, inputs)


def _blocks(kind: str, outputs: int, inputs: int, random: torch.Generator) -> StoredRows:
    """Return random bytes with valid scales."""
    form, device = FORMATS[kind], random.device
    count = outputs * inputs // form.size
    raw = torch.randint(0, 256, (count, form.bytes), generator=random, dtype=torch.uint8, device=device)
    _scale(kind, raw, 1.0)
    size = form.values(raw[:256]).square().mean().sqrt() * inputs**0.5
    _scale(kind, raw, 1 / size.item())
    return StoredRows(kind, raw.view(outputs, -1))


def _scale(kind: str, blocks: torch.Tensor, scale: float) -> None:
    half = torch.tensor([scale], dtype=torch.float16).view(torch.uint8).to(blocks.device)
    for at in HALVES[kind]:
        blocks[:, at : at + 2] = half


def _mxfp4(outputs: int, inputs: int, random: torch.Generator) -> Codes:
    which = torch.randint(0, len(_DOUBLED), (outputs, inputs), generator=random, device=random.device)
    size = _DOUBLED.float().square().mean().sqrt() * inputs**0.5
    scales = torch.full((outputs, inputs // RUN), 2.0 ** -round(size.log2().item()), device=random.device)
    return Codes(_DOUBLED.to(random.device)[which], scales)


def _integers(form: str, outputs: int, inputs: int, random: torch.Generator) -> Codes:
    groups, device = -(-inputs // GROUP), random.device
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
