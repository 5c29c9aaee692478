"""Maximum context length of a model, from its config.json."""

from __future__ import annotations

from typing import Any


def context_length(config: dict[str, Any]) -> int:
    """Return the longest sequence that a config.json promises, in tokens; 0 if it promises nothing.

    yarn and linear multiply the original length by their factor. llama3 and longrope state the extended length. dynamic
    is served up to the original length: beyond it, its frequencies depend on the current length of the sequence, which
    cached keys cannot follow."""
    names = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length", "max_seq_len")
    length = next((int(config[name]) for name in names if isinstance(config.get(name), int)), 0)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor") or 1.0
    if kind == "linear":
        return int(length * factor)
    if kind == "yarn":
        return max(length, int((rope.get("original_max_position_embeddings") or length) * factor))
    return length


def steady_length(config: dict[str, Any]) -> int:
    """Return the same for who takes longrope's factors by how long a sequence has become: its original length."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if rope.get("rope_type", rope.get("type")) not in ("longrope", "su"):
        return context_length(config)
    original = config.get("original_max_position_embeddings")
    return int(rope.get("original_max_position_embeddings") or original or context_length(config))
