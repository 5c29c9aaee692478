"""What of the GPU benchmark can be proven without a GPU: its forms agree, its books of bytes add up, it refuses."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks import gpu_kernels, gpu_subject
from benchmarks.gpu_products import FORMS, product
from kvferry.kernels.gpu_weight_layout import form_of_stored
from kvferry.kernels.quantised_cache import FP8
from kvferry.kernels.reference import ReferenceOps


class CodesAsTold(ReferenceOps):
    """Runs codes in the form that a GPU has them in, if the benchmark's are of the kind that it names."""

    def packed(self, parts: Any, columns: int, bias: torch.Tensor | None = None) -> Any:
        form = form_of_stored(parts[0])
        assert form is not None
        return self.linear(form.rows(torch.arange(len(form.codes))), bias)


@pytest.fixture(scope="module")
def bench() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gpu_subject, "COLD_BYTES", 1)
        yield vars(gpu_kernels)


@pytest.mark.parametrize(("seqs", "query_len", "computed_len"), [(3, 1, 40), (1, 33, 0), (2, 17, 20)])
def test_attention_forms_agree(bench: dict[str, Any], seqs: int, query_len: int, computed_len: int) -> None:
    shape = bench["Shape"](6, 2, 16, torch.float32, torch.device("cpu"))
    subject = bench["attention"](ReferenceOps(), shape, seqs, query_len, computed_len)
    bench["check"](subject)
    kv = 2 * seqs * (query_len + computed_len) * 2 * 16
    assert subject.moved == 4 * (kv + 2 * seqs * query_len * 6 * 16)
    pairs = sum(computed_len + j + 1 for j in range(query_len))
    assert subject.work == 4 * seqs * 6 * 16 * pairs


@pytest.mark.parametrize(("cache", "name"), [(torch.int8, "int8"), (FP8, "fp8")])
@pytest.mark.parametrize(("query_len", "computed_len"), [(1, 40), (17, 20)])
def test_attention_over_8_bits_moves_less(
    bench: dict[str, Any], query_len: int, computed_len: int, cache: torch.dtype, name: str
) -> None:
    shape = bench["Shape"](6, 2, 16, torch.float32, torch.device("cpu"))
    subject = bench["attention"](ReferenceOps(), shape, 2, query_len, computed_len, cache)
    bench["check"](subject)
    assert subject.title.endswith(f", {name}")
    assert subject.moved == 2 * 2 * (query_len + computed_len) * 2 * 20 + 4 * 2 * 2 * query_len * 6 * 16


@pytest.mark.parametrize(("seqs", "query_len", "computed_len"), [(3, 1, 40), (2, 17, 20)])
def test_latent_attention_forms_agree(bench: dict[str, Any], seqs: int, query_len: int, computed_len: int) -> None:
    shape = bench["Shape"](3, 3, 16, torch.float32, torch.device("cpu"))
    subject = bench["latent_attention"](ReferenceOps(), shape, seqs, query_len, computed_len)
    bench["check"](subject)
    vectors, tokens = seqs * (query_len + computed_len), seqs * query_len
    assert subject.moved == 4 * (vectors * 576 + 3 * 512 * 256 + tokens * 3 * (192 + 128))
    pairs = seqs * sum(computed_len + j + 1 for j in range(query_len))
    of_pairs, changed = (1088, tokens) if query_len == 1 else (320, vectors)
    assert subject.work == 2 * 3 * (of_pairs * pairs + changed * 512 * 256)


def test_latents_in_fp8_move_less(bench: dict[str, Any]) -> None:
    shape = bench["Shape"](3, 3, 16, torch.float32, torch.device("cpu"))
    subject = bench["latent_attention"](ReferenceOps(), shape, 2, 1, 20, FP8)
    bench["check"](subject)
    assert subject.title.endswith(", fp8")
    assert subject.moved == 2 * 21 * 580 + 4 * (3 * 512 * 256 + 2 * 3 * (192 + 128))


@pytest.mark.parametrize("kind", ["delta rule", "scan", "convolution"])
def test_recurrent_forms_agree(bench: dict[str, Any], kind: str) -> None:
    shape = bench["Shape"](3, 3, 16, torch.float32, torch.device("cpu"))
    for query_len in (1, 3):
        subject = bench["recurrent_layer"](ReferenceOps(), shape, kind, 2, query_len)
        bench["check"](subject)
        assert subject.title == f"{kind} 2 x {query_len}"
        assert subject.work > 0
        assert subject.layers == 1
    floats = {"delta rule": 32 * 128 * 128, "scan": 48 * 64 * 128, "convolution": 8192 * 3}[kind]
    assert 8 * 2 * floats < subject.moved < 8 * 2 * floats + (1 << 20)


STORED = {
    "int4": 0.5 + 2 / 128,
    "int4, zero points": 0.5 + 4 / 128,
    "int8": 1 + 4 / 256,
    "fp8": 1 + 4 / 128,
    "Q4_0": 0.5 + 2 / 32,
    "Q8_0": 1 + 2 / 32,
    "Q4_K": 0.5 + 2 / 32 + 4 / 256,
    "Q6_K": 0.75 + 1 / 16 + 2 / 256,
    "MXFP4": 0.5 + 2 / 32,
}
"""Bytes of a weight."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ops", [ReferenceOps(), CodesAsTold()])
def test_products_agree(bench: dict[str, Any], form: str, ops: ReferenceOps) -> None:
    shape = bench["Shape"](4, 2, 64, torch.float32, torch.device("cpu"))
    subject = product(ops, shape, form, 3)
    bench["check"](subject)
    assert subject.moved == 4 * 256 * 256 * STORED[form] + 4 * 3 * 5 * 256
    assert subject.work == 2 * 3 * 4 * 256 * 256
    assert 0.5 < subject.peer(0).std() < 2


def test_a_wrong_kernel_is_not_timed(bench: dict[str, Any]) -> None:
    class Wrong(ReferenceOps):
        def paged_attention(self, *args: Any, **options: Any) -> torch.Tensor:
            return super().paged_attention(*args, **options) * 1.5

    shape = bench["Shape"](6, 2, 16, torch.float32, torch.device("cpu"))
    with pytest.raises(AssertionError, match="decode 3 x 1 at 40"):
        bench["check"](bench["attention"](Wrong(), shape, 3, 1, 40))


def test_pointwise_forms_agree(bench: dict[str, Any]) -> None:
    shape = bench["Shape"](6, 2, 16, torch.float32, torch.device("cpu"))
    found = list(bench["pointwise"](ReferenceOps(), shape, 5))
    assert [subject.title.split()[0] for subject in found] == ["add_rms_norm", "gate_mul", "rope_and_cache"]
    assert [subject.moved for subject in found] == [4 * 4 * 5 * 96, 3 * 4 * 5 * 96, 2 * 4 * 5 * 10 * 16]
    for subject in found:
        bench["check"](subject)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
@pytest.mark.parametrize("name", ["gpu_kernels", "gpu_checksums", "gpu_steps"])
def test_without_cuda_it_says_so(name: str) -> None:
    with pytest.raises(SystemExit, match="CUDA"):
        importlib.import_module(f"benchmarks.{name}").main([])
