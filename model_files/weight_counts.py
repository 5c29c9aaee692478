"""Number of weights of each kind in a model, and their size as stored."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.model_files.safetensors_headers import Tensor

NOWHERE, ON_CPU, ON_GPU = "", "cpu", "gpu"
"""Where weights run as they are stored."""
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "token_embd.weight", "word_embeddings.weight")
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
_WIDENED = ("kv_b_proj.weight", "attn_kv_b.weight", "attn_k_b.weight", "attn_v_b.weight")
"""Of latent attention, read in two forms in which its rows are no rows of the file (engine/models/latent.py)."""


@dataclass(frozen=True, slots=True)
class WeightCount:
    """A kind of weight: how many there are; on a CPU the bytes of those that run as they are stored and the number of
    the others; how many of them one token meets (fewer in mixtures of experts); bytes and number of those that do on a
    GPU."""

    weights: int = 0
    stored_bytes: float = 0.0
    plain: int = 0
    active: float = 0.0
    coded_bytes: float = 0.0
    coded: int = 0

    def bytes(self, itemsize: float, stored: str = NOWHERE) -> float:
        """In memory: as they are stored where that runs on a CPU or a GPU, or all in `itemsize` bytes a weight."""
        if stored == NOWHERE:
            return itemsize * self.weights
        if stored == ON_GPU:
            return self.coded_bytes + itemsize * (self.weights - self.coded)
        return self.stored_bytes + itemsize * self.plain


def counted(tensors: Iterable[Tensor], expert_share: float) -> tuple[WeightCount, WeightCount, WeightCount]:
    """dense, embedding, head."""
    parts = {"dense": WeightCount(), "embedding": WeightCount(), "head": WeightCount()}
    for tensor in tensors:
        if len(tensor.shape) < 2:
            continue
        part = "embedding" if _ends(tensor, _EMBEDDINGS) else "head" if _ends(tensor, _HEADS) else "dense"
        count, old = math.prod(tensor.shape), parts[part]
        chosen = ("expert" in tensor.name and "shared_expert" not in tensor.name) or "_exps." in tensor.name
        share = expert_share if chosen else 1.0
        as_stored = not _ends(tensor, _WIDENED)
        stored, coded = (tensor.stored_bytes, tensor.coded_bytes) if as_stored else (None, None)
        parts[part] = WeightCount(
            old.weights + count,
            old.stored_bytes + (stored or 0.0),
            old.plain + (count if stored is None else 0),
            old.active + share * count,
            old.coded_bytes + (coded or 0.0),
            old.coded + (0 if coded is None else count),
        )
    return parts["dense"], parts["embedding"], parts["head"]


def _ends(tensor: Tensor, names: tuple[str, ...]) -> bool:
    return any(tensor.name == name or tensor.name.endswith(f".{name}") for name in names)
