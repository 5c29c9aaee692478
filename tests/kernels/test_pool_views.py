"""Layers of different shapes in one block: their views cover it without overlap, and every backend reads and writes
them as it does a pool of like layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.ops import Ops
from kvferry.kernels.pool_views import layer_view, layer_views
from kvferry.kernels.quantised_cache import FP8
from kvferry.kernels.reference import ReferenceOps
from kvferry.protocol.layout import CachedLayer, KVLayout
from tests.kernels.paged_batch import make_case, rope_table

LAYERS = (CachedLayer(2, 32), CachedLayer(1, 64), CachedLayer(2, 96), CachedLayer(1, 48, 1))
BACKENDS: dict[str, Callable[[], Ops]] = {"reference": ReferenceOps}
if instruction_set() is not None:
    BACKENDS["cpu"] = lambda: CpuOps(1)


def test_views_cover_a_block_once() -> None:
    layout = KVLayout(4, 2, 32, "float32", 8, layers=LAYERS)
    pool = torch.zeros(3, *layout.block_shape)
    for number, view in enumerate(layer_views(pool, LAYERS, 8), 1):
        shape = LAYERS[number - 1].shape(8, "float32")
        assert view.shape == (3, *shape)
        view[1] += torch.arange(number, number + math.prod(shape)).view(shape)
    places = [math.prod(each.shape(8, "float32")) for each in LAYERS]
    wanted = torch.cat([torch.arange(number, number + size) for number, size in enumerate(places, 1)])
    assert torch.equal(pool[1], wanted.float())
    assert not pool[::2].any()


def test_a_view_begins_where_its_pool_begins() -> None:
    layout = KVLayout(4, 2, 32, "float32", 8, layers=LAYERS)
    memory = torch.arange(4.0 * layout.numbers).view(4, -1)
    assert torch.equal(layer_view(memory[2:], 1, LAYERS, 8)[0], layer_view(memory, 1, LAYERS, 8)[2])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cache", [None, torch.int8, FP8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_layer_among_others_is_written_and_read_like_one_alone(
    index: int, dtype: torch.dtype, cache: torch.dtype | None, backend: str
) -> None:
    """Of decodes and prompts, with a window and without. Other layers' bytes stay."""
    shape = LAYERS[index]
    case = make_case(
        [1, 1, 9, 23], [40, 7, 30, 23], 2,
        heads=4, kv_heads=shape.kv_heads, dim=shape.head_dim, dtype=dtype, cache=cache, block_size=16,
    )  # fmt: skip
    alone = case.kv_layer.clone(memory_format=torch.contiguous_format)
    name = str(cache or dtype).removeprefix("torch.")
    layout = KVLayout(3, 2, 32, name, 16, layers=LAYERS[:3])
    pool = torch.zeros(len(alone), layout.block_bytes, dtype=torch.uint8).view(cache or dtype)
    pool.view(torch.uint8).fill_(7)
    view = layer_view(pool, index, LAYERS[:3], 16)
    view.view(torch.uint8).copy_(alone.view(torch.uint8))
    random = torch.Generator().manual_seed(3)
    made = torch.randn(case.plan.num_tokens, 4 + 2 * shape.kv_heads, shape.head_dim, generator=random).to(dtype)
    q, k, v = made.split([4, shape.kv_heads, shape.kv_heads], 1)
    found = []
    for layer in (alone, view):
        ops = BACKENDS[backend]()
        turned = ops.rope_and_cache(q, k, v, *rope_table(64, shape.head_dim), layer, case.plan)
        outs = [ops.paged_attention(turned, layer, case.plan, 0.2, window) for window in (0, 9)]
        unwritten = ops.rope_and_cache(q, None, None, *rope_table(64, shape.head_dim), layer, case.plan)
        assert torch.equal(unwritten, turned), "without K only q is rotated"
        found.append((turned, *outs, layer.clone().view(torch.uint8)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    view.view(torch.uint8).fill_(7)
    assert (pool.view(torch.uint8) == 7).all(), "another layer was written"


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_of_two_shapes_in_one_step_do_not_mix(backend: str) -> None:
    """The index of one batch is kept for each shape."""
    ops, results = BACKENDS[backend](), []
    for shape in (LAYERS[0], LAYERS[1], LAYERS[0]):
        case = make_case([1, 20], [33, 20], 1, heads=4, kv_heads=shape.kv_heads, dim=shape.head_dim)
        plan = results[0][1] if results else case.plan
        case = replace(case, plan=plan)
        results.append((ops.paged_attention(case.q, case.kv_layer, plan, 0.2), plan))
        fresh = BACKENDS[backend]().paged_attention(case.q, case.kv_layer, plan, 0.2)
        assert torch.equal(results[-1][0], fresh)
