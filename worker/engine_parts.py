"""Result of an engine's construction: the engine, its KV pool, and the facts that the node announces about them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvferry.engine.engine import Engine
from kvferry.engine.media.local_embeddings import LocalEmbeddings
from kvferry.engine.models.base import Computing, ModelInfo
from kvferry.kernels.cpu import CpuOps
from kvferry.kernels.ops import Ops
from kvferry.protocol.adapters import AdapterName
from kvferry.protocol.layout import KVLayout
from kvferry.protocol.media import COMPRESSED_AUDIO
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker.device_rank_pool import DeviceRankPool
from kvferry.worker.media_loading import NodeMedia
from kvferry.worker.pool_memory import GIB
from kvferry.worker.ranks import Ranks
from kvferry.worker.window_layers import pool_tokens


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Engine that is ready to run, and what the node announces about it.

    kv: the pool of this process. ranks: the other ranks, if several compute the model. eos_token_ids: tokens that end
    an output; set only with --enable-scale-out, since kvferry's routers send them. media: encoder of images and audio;
    None: prompts contain only text."""

    engine: Engine
    kv: torch.Tensor
    info: ModelInfo
    layout: KVLayout
    fingerprint: str
    max_model_len: int
    adapters: tuple[AdapterName, ...] = ()
    ranks: Ranks | None = None
    eos_token_ids: tuple[int, ...] = ()
    media: NodeMedia | None = None

    @property
    def modalities(self) -> tuple[str, ...]:
        """Return the modalities that prompts may contain."""
        return self.media.modalities if self.media is not None else ()

    @property
    def abilities(self) -> tuple[str, ...]:
        """Return the modalities as the lease announces them."""
        return (*self.modalities, COMPRESSED_AUDIO) if "audio" in self.modalities else self.modalities

    @property
    def embeddings(self) -> LocalEmbeddings | None:
        """Return the local source of media embeddings; None if prompts contain only text."""
        return self.media.embeddings if self.media is not None else None

    @property
    def media_row_bytes(self) -> int:
        """Return the size of an embedding row in bytes; 0 unless rows are kept in blocks."""
        encoder = self.engine.media.encoder
        return (
            0 if encoder is None or self.apart is not None else encoder.width * self.engine.runner.model.dtype.itemsize
        )

    @property
    def apart(self) -> DeviceRankPool | None:
        """Return the joined pool of all ranks, if each rank has a pool of its own; None otherwise."""
        return self.ranks.pool if self.ranks is not None else None


def describe(parts: EngineParts) -> dict[str, str]:
    """Describe the node's model, devices and pool size for a person.

    Ranks on GPUs use consecutive devices; the first is named."""
    ops, pool = parts.engine.runner.model.ops, parts.engine.pool
    threads = ops.threads if isinstance(ops, CpuOps) else torch.get_num_threads()
    on_cpu, ranks = parts.kv.device.type == "cpu", parts.ranks.part.group.ranks if parts.ranks is not None else 1
    times = f"{ranks} x " if ranks > 1 else ""
    gib = pool.num_blocks * parts.layout.block_bytes / GIB
    tokens = pool_tokens(parts.layout, pool.num_blocks, parts.max_model_len)
    return {
        "model": parts.info.name,
        "device": f"cpu, threads: {times}{threads}" if on_cpu else f"{times}{parts.kv.device}",
        "kv_pool": "none" if parts.engine.config.limits.whole else f"{gib:.2f} GiB, {tokens} tokens",
    }


def arithmetic(settings: WorkerSettings, model: Computing, ops: Ops) -> str:
    """Return the part of the fingerprint that names the arithmetic.

    It is the model's number format. With --batch-invariant on a CPU it adds the instruction set and the number of
    ranks, because nodes then promise equal bits."""
    words = [str(model.dtype).removeprefix("torch.")]
    if settings.batch_invariant and isinstance(ops, CpuOps):
        words += ["batch-invariant", ops.instruction_set]
        if settings.tensor_parallel_size > 1:
            words.append(f"{settings.tensor_parallel_size} ranks")
        if settings.enable_expert_parallel:
            words.append("of experts")
    return " ".join(words)
