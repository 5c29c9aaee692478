"""Counts the weights of each kind in a model (dense, embedding, head), and their bytes as stored."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.model_files.safetensors_headers import Tensor

NOWHERE, ON_CPU, ON_GPU = "", "cpu", "gpu"
"""Devices whose kernels run weights as they are stored, for `WeightCount.bytes`."""
_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "token_embd.weight",
    "word_embeddings.weight",
    "embeddings.weight",
)
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
_TABLES = ("embed_tokens_per_layer.weight", "per_layer_token_embd.weight")
"""Embeddings of which a token reads one row and nothing multiplies."""
_WIDENED = ("kv_b_proj.weight", "attn_kv_b.weight", "attn_k_b.weight", "attn_v_b.weight")
"""Weights of latent attention, read in two forms whose rows are no rows of the file (engine/models/latent.py)."""


@dataclass(frozen=True, slots=True)
class WeightCount:
    """Count and size of one kind of weights.

    weights: all of them. stored_bytes, plain: on a CPU, the bytes of those that run as stored and the number of the
    others. active: the number that one token meets, fewer in mixtures of experts. coded_bytes, coded: on a GPU, bytes
    and number of those that run as stored."""

    weights: int = 0
    stored_bytes: float = 0.0
    plain: int = 0
    active: float = 0.0
    coded_bytes: float = 0.0
    coded: int = 0

    def bytes(self, itemsize: float, stored: str = NOWHERE) -> float:
        """Return the bytes in memory: as stored where that runs on a CPU or GPU, else `itemsize` bytes per weight."""
        if stored == NOWHERE:
            return itemsize * self.weights
        if stored == ON_GPU:
            return self.coded_bytes + itemsize * (self.weights - self.coded)
        return self.stored_bytes + itemsize * self.plain


def counted(tensors: Iterable[Tensor], expert_share: float) -> tuple[WeightCount, WeightCount, WeightCount]:
    """Return the counts of dense weights, of the embedding and of the head."""
    parts = {"dense": WeightCount(), "embedding": WeightCount(), "head": WeightCount()}
    for tensor in tensors:
        if len(tensor.shape) < 2:
            continue
        part = "embedding" if _ends(tensor, _EMBEDDINGS) else "head" if _ends(tensor, _HEADS) else "dense"
        count, old = math.prod(tensor.shape), parts[part]
        share = expert_share if _of_chosen_experts(tensor.name) else 1.0
        share = 0.0 if _ends(tensor, _TABLES) else share
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


def _of_chosen_experts(name: str) -> bool:
    """Return whether the tensor is of experts of which a token meets some, by its name in any kind of file."""
    stacked = "_exps." in name or ("block_sparse_moe." in name and "put_linear." in name)
    return stacked or ("expert" in name and "shared_expert" not in name)


def _ends(tensor: Tensor, names: tuple[str, ...]) -> bool:
    return any(tensor.name == name or tensor.name.endswith(f".{name}") for name in names)
