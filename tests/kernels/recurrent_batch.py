"""Recurrent layers of real models' shapes, in batches, for the tests of backends against the reference."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.recurrent_ops import RecurrentOps
from kvferry.kernels.reference import ReferenceOps
from kvferry.kernels.sequence_state import SequenceStates

BATCHES = {
    "a decode": ((1,), (0,), (3,)),
    "decodes": ((1, 1, 1, 1, 1), (0, -1, 2, 5, 6), (1, 3, -1, 4, 7)),
    "a prompt": ((77,), (-1,), (2,)),
    "a chunk": ((64,), (2,), (-1,)),
    "all": ((1, 1, 5, 2, 33, 3, 100), (4, -1, -1, 0, 1, 2, 3), (5, 6, 7, -1, 8, 9, 10)),
}
"""Query tokens of the sequences, and the rows of their states before and after."""

CONVOLUTIONS = {"Qwen3.5": (96, 4), "LFM2": (64, 3), "odd": (37, 4), "wide": (20, 7), "two": (9, 2)}
"""Channels and width."""

DELTA_RULES = {"Qwen3.5": (2, 4, 128, 128), "odd": (1, 3, 20, 21), "unequal": (2, 2, 64, 96), "tiny": (2, 4, 8, 5)}
"""Heads of keys and of values, and their dims."""

SCANS = {
    "Mamba 2": (8, 64, 1, 128), "groups": (8, 64, 4, 128), "Falcon-H1": (4, 64, 1, 256), "MiniMax": (2, 128, 2, 128),
    "odd": (6, 5, 3, 21),
}  # fmt: skip
"""Heads, their dim, groups and n."""

CHANNELS = {"Jamba": (300, 1, 1, 16), "odd": (37, 1, 1, 7)}
"""The same of Mamba 1."""

ROWS = 12


Known = tuple["Layer", torch.Tensor, torch.Tensor]
"""A layer, its results and the rows of states after it."""


def plan_of(lens: tuple[int, ...], rows: torch.Tensor, before: tuple[int, ...], after: tuple[int, ...]) -> BatchPlan:
    """Return a plan with `states` alone, and what says how long the sequences are."""
    nothing = torch.zeros(0, dtype=torch.int64)
    starts = torch.tensor([sum(lens[:seq]) for seq in range(len(lens) + 1)], dtype=torch.int32)
    states = SequenceStates(rows, torch.tensor(before), torch.tensor(after))
    decodes = next((seq for seq, count in enumerate(lens) if count != 1), len(lens))
    return BatchPlan(nothing, nothing, nothing, starts, nothing, tuple(lens), tuple(lens), decodes, 16, states=states)


@dataclass(frozen=True)
class Layer:
    """A recurrent layer with random inputs. kind: a method of `RecurrentOps`; tokens: how many of the inputs are
    [T, ...]; inner: shape of a sequence's state."""

    kind: str
    inputs: tuple[torch.Tensor | None, ...]
    of_tokens: tuple[int, ...]
    inner: tuple[int, ...]

    def run(self, ops: RecurrentOps, plan: BatchPlan) -> torch.Tensor:
        assert plan.states is not None
        states = self.states(plan.states.rows)
        options = {"silu": True} if self.kind == "causal_conv" else {}
        found: torch.Tensor = getattr(ops, self.kind)(*self.inputs, states, plan, **options)
        return found

    def states(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the layer's view of the rows."""
        return rows[:, 3 : 3 + math.prod(self.inner)].view(len(rows), *self.inner)

    def cut(self, begin: int, end: int) -> Layer:
        """Return the layer of some of the tokens."""
        parts = [
            each[begin:end] if index in self.of_tokens and each is not None else each
            for index, each in enumerate(self.inputs)
        ]
        return replace(self, inputs=tuple(parts))

    def rows(self, count: int = ROWS) -> torch.Tensor:
        """Return random states, between which lies something else."""
        size = math.prod(self.inner) + 8
        return torch.randn(count, size, generator=torch.Generator().manual_seed(7)) * 0.3


def strided(x: torch.Tensor) -> torch.Tensor:
    """Return x as a part of wider rows, as a projection leaves it."""
    flat = x.flatten(1)
    wide = torch.cat((flat, flat[:, :5]), 1)
    return wide[:, : flat.shape[1]].unflatten(1, x.shape[1:])


def convolution(name: str, tokens: int, dtype: torch.dtype, *, bias: bool = True) -> Layer:
    numbers, (channels, width) = torch.Generator().manual_seed(tokens), CONVOLUTIONS[name]
    x = torch.randn(tokens, channels, generator=numbers).to(dtype)
    weight = torch.randn(channels, width, generator=numbers).to(dtype)
    own = torch.randn(channels, generator=numbers).to(dtype) if bias else None
    return Layer("causal_conv", (strided(x), weight, own), (0,), (channels, width - 1))


def gated_convolution(name: str, tokens: int, dtype: torch.dtype, *, bias: bool = True) -> Layer:
    layer, numbers = convolution(name, tokens, dtype, bias=bias), torch.Generator().manual_seed(tokens + 1)
    x = torch.randn(tokens, 3 * CONVOLUTIONS[name][0], generator=numbers).to(dtype)
    return Layer("gated_conv", (strided(x), *layer.inputs[1:]), layer.of_tokens, layer.inner)


def delta_rule(name: str, tokens: int, dtype: torch.dtype) -> Layer:
    numbers, (k_heads, v_heads, k_dim, v_dim) = torch.Generator().manual_seed(tokens), DELTA_RULES[name]
    q, k = (strided(torch.randn(tokens, k_heads, k_dim, generator=numbers).to(dtype)) for _ in range(2))
    v = strided(torch.randn(tokens, v_heads, v_dim, generator=numbers).to(dtype))
    decay = -(torch.rand(tokens, v_heads, generator=numbers) ** 4) * 3
    beta = torch.rand(tokens, v_heads, generator=numbers)
    return Layer("gated_delta_rule", (q, k, v, strided(decay), beta), (0, 1, 2, 3, 4), (v_heads, k_dim, v_dim))


def scan(name: str, tokens: int, dtype: torch.dtype, *, direct: bool = True) -> Layer:
    numbers = torch.Generator().manual_seed(tokens)
    heads, dim, groups, n = {**SCANS, **CHANNELS}[name]
    x = strided(torch.randn(tokens, heads, dim, generator=numbers).to(dtype))
    b, c = (strided(torch.randn(tokens, groups, n, generator=numbers).to(dtype)) for _ in range(2))
    dt = strided(torch.rand(tokens, heads, generator=numbers) ** 3)
    a = -torch.rand(*((heads, n) if name in CHANNELS and dim == 1 else (heads,)), generator=numbers) * 8
    d = torch.randn(heads, generator=numbers) if direct else None
    return Layer("state_space_scan", (x, dt, a, b, c, d), (0, 1, 3, 4), (heads, dim, n))


def every_layer(tokens: int, dtype: torch.dtype) -> list[Layer]:
    """Return a layer of each shape."""
    return [
        *(make(name, tokens, dtype) for make in (convolution, gated_convolution) for name in CONVOLUTIONS),
        *(delta_rule(name, tokens, dtype) for name in DELTA_RULES),
        *(scan(name, tokens, dtype) for name in {**SCANS, **CHANNELS} if name != "odd"),
    ]


def equal(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, share: float = 1e-5) -> None:
    """Hold `found` to `wanted` within a share of the largest number; bfloat16 within two roundings, too."""
    rounding = 0.0 if dtype == torch.float32 else 2**-7
    bound = share * float(wanted.float().abs().max().clamp(min=1e-3)) if wanted.numel() else 0.0
    torch.testing.assert_close(found.float(), wanted.float(), atol=bound, rtol=rounding)


@functools.cache
def known(make: Callable[..., Layer], name: str, batch: str, dtype: torch.dtype, **options: bool) -> Known:
    """Return the layer with the reference's results and states, which backends share."""
    lens, before, after = BATCHES[batch]
    layer = make(name, sum(lens), dtype, **options)
    rows = layer.rows()
    return layer, layer.run(ReferenceOps(), plan_of(lens, rows, before, after)), rows


def both(ops: RecurrentOps, batch: str, case: Known, share: float = 1e-5) -> None:
    """Hold the layer's results and states on `ops` to those of the reference."""
    (lens, before, after), (layer, wanted, states) = BATCHES[batch], case
    rows = layer.rows()
    own = rows.clone()
    found = layer.run(ops, plan_of(lens, own, before, after))
    assert found.dtype == wanted.dtype
    equal(found, wanted, wanted.dtype, share)
    equal(own, states, torch.float32, share)
    kept = [row for row in range(ROWS) if row not in after]
    assert torch.equal(own[kept], rows[kept])


def extreme_delta_rule(tokens: int) -> Layer:
    """Return a delta rule that forgets nothing, a little or everything, with strengths of 0 and 1, and with keys that
    are zero or come again and again."""
    numbers, (heads, k_dim, v_dim) = torch.Generator().manual_seed(tokens), (3, 24, 40)
    q, k = (torch.randn(tokens, heads, k_dim, generator=numbers) for _ in range(2))
    v = torch.randn(tokens, heads, v_dim, generator=numbers)
    often = torch.rand(tokens, heads, generator=numbers)
    k = torch.where((often < 0.6)[..., None], k[:1], torch.where((often > 0.9)[..., None], 0.0, k))
    decays = torch.tensor([0.0, -0.0, -1e-7, -0.01, -0.3, -20.0, -200.0, -1e6, -float("inf")])
    likely = torch.tensor([8.0, 1.0, 8.0, 8.0, 4.0, 0.2, 0.2, 0.2, 0.2])
    drawn = torch.multinomial(likely, tokens * heads, replacement=True, generator=numbers)
    beta = torch.rand(tokens, heads, generator=numbers)
    beta = torch.where(beta < 0.3, 0.0, torch.where(beta > 0.6, 1.0, beta))
    return Layer(
        "gated_delta_rule", (q, k, v, decays[drawn].view(tokens, heads), beta), (0, 1, 2, 3, 4), (heads, k_dim, v_dim)
    )


def extreme_scan(tokens: int) -> Layer:
    """Return a scan whose heads forget nothing, a little or everything, with steps of 0 and large ones."""
    numbers, (heads, dim, groups, n) = torch.Generator().manual_seed(tokens), (4, 24, 2, 40)
    x = torch.randn(tokens, heads, dim, generator=numbers)
    b, c = (torch.randn(tokens, groups, n, generator=numbers) for _ in range(2))
    steps = torch.tensor([0.0, 1e-4, 0.1, 1.0, 30.0])
    dt = steps[torch.randint(0, 5, (tokens, heads), generator=numbers)]
    a = torch.tensor([-1e-6, -0.02, -3.0, -1e4])
    return Layer("state_space_scan", (x, dt, a, b, c, torch.ones(heads)), (0, 1, 3, 4), (heads, dim, n))
