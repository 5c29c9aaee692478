"""Pools hidden states of a prompt, chunk by chunk, into its embedding vector; packs vectors and logits as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvferry.engine.request import Request
from kvferry.engine.step_slices import Slice
from kvferry.protocol.work import Embed


@dataclass(frozen=True, slots=True)
class Read:
    """Result of a request that generates nothing: float32 in little-endian order; empty if it has NaN."""

    vector: bytes


class Dense:
    """Layer after the pooling: weight [out, in] and bias [out], float32, then `activation`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: torch.nn.Module) -> None:
        self._weight, self._bias, self._activation = weight, bias, activation

    def __call__(self, vectors: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self._activation(torch.nn.functional.linear(vectors, self._weight, self._bias))
        return made


class Pooler:
    """Pooling of one model; `dense` are the layers after it."""

    def __init__(self, dense: Sequence[Dense] = ()) -> None:
        self._dense = tuple(dense)

    def finish(self, requests: Sequence[Request]) -> list[Read]:
        """Return the vectors of requests whose last slice was taken."""
        pooled = []
        for request in requests:
            assert request.pooled is not None
            mean = _work(request).pooling == "mean"
            pooled.append(request.pooled / len(request.token_ids) if mean else request.pooled)
        vectors = torch.stack(pooled)
        for layer in self._dense:
            vectors = layer(vectors)
        return [_read(vector, _work(request)) for vector, request in zip(vectors.cpu(), requests, strict=True)]


def take(part: Slice, hidden: torch.Tensor) -> None:
    """Add the slice's hidden states [count, hidden] to its request's pooled state; slices come in order."""
    request, pooling = part.request, _work(part.request).pooling
    if pooling == "mean":
        chunk = hidden.sum(0, dtype=torch.float32)
        request.pooled = chunk if request.pooled is None else request.pooled + chunk
    elif pooling == "cls" and part.start == 0:
        request.pooled = hidden[0].float()
    elif pooling == "last" and part.samples:
        request.pooled = hidden[-1].float()


def read(logits: torch.Tensor) -> Read:
    """Pack float32 numbers on the CPU as a Read."""
    found: bool = torch.isfinite(logits).all().item()  # type: ignore[assignment]
    return Read(logits.numpy().astype("<f4").tobytes() if found else b"")


def _read(vector: torch.Tensor, work: Embed) -> Read:
    """Truncate and then normalise the vector: a truncated vector of length 1 has another length."""
    kept = vector[: work.dimensions or None]
    return read(torch.nn.functional.normalize(kept, dim=0) if work.normalize else kept)


def _work(request: Request) -> Embed:
    assert isinstance(request.job.work, Embed)
    return request.job.work
