"""MediaInputs: adds media to a batch plan: rows in place of embeddings, rotary positions, and how far tokens attend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import numpy as np

from kvferry.engine.media.request_media import placed
from kvferry.engine.step_slices import Slice
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.input_staging import Staging
from kvferry.kernels.media_rows import MediaRows


class MediaInputs:
    """Media's inputs of one runner's steps. Its results are valid until the next call."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging

    def joined(self, plan: BatchPlan, slices: Sequence[Slice]) -> BatchPlan:
        """Return the plan of these slices with what their requests' media add to it.

        Raises StepFailed if rows are not here."""
        spans = [(s.request.media, s.start, s.count + len(s.drafts)) for s in slices]
        firsts = accumulate((count for _, _, count in spans), initial=0)
        reading = [(media, start, count, at) for (media, start, count), at in zip(spans, firsts, strict=False) if media]
        shifted = any(media.shifted for media, *_ in reading)
        reading_rows = [each for each in reading if each[1] < each[0].end]
        seeing = any(media.bidirectional for media, *_ in reading_rows)
        runs = [(at + first, own) for m, start, count, at in reading_rows for first, own in m.rows_of(start, count)]
        if not (shifted or runs):
            return plan
        positions = np.concatenate([np.arange(start, start + count) for _, start, count in spans])
        rope, until, (tokens, rows) = np.tile(positions, (3, 1)), positions.astype(np.int32), placed(runs)
        for media, start, count, at in reading:
            rope[:, at : at + count] = media.positions(start, count)
            until[at : at + count] = media.seen_until(start, count)
        on_device = self._staging.put((rope, until, tokens))
        joined = partial(
            replace,
            media=None if rows is None else MediaRows(on_device[2], rows.to(on_device[2].device)),
            rope_positions=on_device[0] if shifted else None,
            see_until=on_device[1] if seeing else None,
        )
        return joined(plan, windows=tuple(map(joined, plan.windows)))
