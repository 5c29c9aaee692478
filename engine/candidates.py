"""Which tokens of a row can be drawn at all, found on a CPU without sorting the vocabulary.

A vocabulary is long and nearly all of it is far below the most likely tokens: a comparison with a bound leaves few, and
only those are ranked, and get noise.
"""

from __future__ import annotations

import numpy as np

from protocol.sampling import SamplingParams

NEAR = 8.0
"""Natural logarithms below the most likely token within which a row's candidates are looked for first."""


def drawable(values: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """The token ids (uint32) that min_p, top_k and top_p, in this order, keep of a row of scaled logits, float32
    [vocab], and their values. At least one, also where the logits are no numbers."""
    ids: np.ndarray | None = None
    for least in (_min_p_floor, _top_k_floor, _top_p_floor):
        floor = least(values, params)
        if floor is not None:
            kept = np.flatnonzero(values >= floor)
            kept = kept if len(kept) else np.array([values.argmax()])
            ids, values = kept if ids is None else ids[kept], values[kept]
    ids = np.arange(len(values)) if ids is None else ids
    return ids.astype(np.uint32), values


def _min_p_floor(values: np.ndarray, params: SamplingParams) -> np.float32 | None:
    return values.max() + np.log(np.float32(params.min_p)) if params.min_p > 0.0 else None


def _top_k_floor(values: np.ndarray, params: SamplingParams) -> np.float32 | None:
    """The value of the k-th most likely token."""
    if not 0 < params.top_k < len(values):
        return None
    near = _near(values)
    pool = near if len(near) >= params.top_k else values
    floor: np.float32 = np.partition(pool, len(pool) - params.top_k)[len(pool) - params.top_k]
    return floor


def _top_p_floor(values: np.ndarray, params: SamplingParams) -> np.float32 | None:
    """The value of the least likely token for which the more likely ones have less than p together."""
    if params.top_p >= 1.0:
        return None
    top = values.max()
    total = np.exp(values - top).sum()
    for pool in (_near(values), values):
        ranked = np.sort(pool)[::-1]
        mass = np.exp(ranked - top) / total
        count = int(np.count_nonzero(np.cumsum(mass) - mass < params.top_p))
        if count < len(ranked):
            break
    floor: np.float32 = ranked[max(count, 1) - 1]
    return floor


def _near(values: np.ndarray) -> np.ndarray:
    """The values close to the largest one."""
    near: np.ndarray = values[values >= values.max() - np.float32(NEAR)]
    return near
