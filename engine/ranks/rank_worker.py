"""RankWorker: one rank's shard of the decoder, its part of the KV pool, and its copies of a step's inputs."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvferry.engine.models.base import SuspendedPass
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.ranks.group import Group
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.input_staging import Staging
from kvferry.kernels.lora import Adapter


class RankWorker:
    """State of one rank.

    decoder: shard of `group.rank`; adapters: by number, on ranks other than rank 0."""

    def __init__(self, decoder: Decoder, group: Group) -> None:
        self.decoder, self.group = decoder, group
        self.adapters: dict[int, Adapter] = {}
        self._staging = Staging(decoder.device)

    def of_pool(self, kv: torch.Tensor) -> torch.Tensor:
        """Return the rank's part of the pool [block, layer, plane, kv_head, slot, dim]: the bytes of its heads.

        That is the whole pool if all heads share the cached latents, or if the pool is the rank's own."""
        config = self.decoder.config
        if self.group.apart or config.latent is not None:
            return kv
        return kv.narrow(3, self.group.rank * config.num_kv_heads, config.num_kv_heads)

    def inputs(self, token_ids: torch.Tensor, plan: BatchPlan) -> tuple[torch.Tensor, BatchPlan]:
        """Copy a step's inputs from host memory to the rank's device; they are valid until the next call.

        Rank 0 writes for all ranks if heads share the cached latents and the ranks share a pool."""
        slots = plan.slots
        if self.group.rank and not self.group.apart and self.decoder.config.latent is not None:
            slots = torch.full_like(slots, -1)
        small = (token_ids, plan.positions, slots, plan.block_table, plan.query_start, plan.total_len)
        tokens = [each.tokens for each in plan.adapted]
        put = self._staging.put([each.numpy() for each in (*small, *tokens)])
        ids, positions, slots, table, query_start, total_len, *tokens = put
        adapted = tuple(replace(each, tokens=own) for each, own in zip(plan.adapted, tokens, strict=True))
        device, rope, until = self.decoder.device, plan.rope_positions, plan.see_until
        return ids, replace(
            plan, positions=positions, slots=slots, block_table=table, query_start=query_start, total_len=total_len,
            adapted=adapted, media=plan.media and plan.media.to(device),
            rope_positions=None if rope is None else rope.to(device),
            see_until=None if until is None else until.to(device),
        )  # fmt: skip

    def brought(self, halfway: SuspendedPass) -> SuspendedPass:
        """Return the suspended pass, copied to the rank's device."""
        return SuspendedPass(halfway.layer, *(each.to(self.decoder.device) for each in (halfway.x, halfway.residual)))
