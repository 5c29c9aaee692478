"""Construction of an encode node's engine: vision tower and KV pool of the model, without its decoder.

The pool has the layout and fingerprint of the model's other nodes, which fetch media embeddings from it as blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.budget import Limits
from kvferry.engine.engine import Engine, EngineConfig
from kvferry.engine.grammar_masks import GrammarMasks
from kvferry.engine.ledger import Ledger
from kvferry.engine.models.base import Computing, KeepGoing, ModelInfo, SuspendedPass
from kvferry.engine.models.loader import auto_dtype, read_info
from kvferry.engine.sample_rows import Outcome
from kvferry.engine.state_memory import StateMemory
from kvferry.engine.step_slices import Slice
from kvferry.kernels.decoder_step import always
from kvferry.kernels.ops import Ops, select
from kvferry.model_files.source import ModelSource
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.layout import cache_format
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker.engine_parts import EngineParts, arithmetic
from kvferry.worker.media_loading import load_media
from kvferry.worker.pool_memory import GIB, make_pool, pool_blocks

log = logging.getLogger("kvferry.worker")


@dataclass(slots=True, eq=False)
class ModelOutline:
    """Facts of a model whose weights are not loaded. Implements `engine.models.base.Computing`."""

    info: ModelInfo
    dtype: torch.dtype
    device: torch.device
    ops: Ops
    resumable: bool = False
    fed_by_host: bool = False


class NoSteps:
    """Runner of an engine that computes no steps. Implements `engine.runner.StepRunner`."""

    waited_s = 0.0
    launch = None
    states: StateMemory | None = None

    def __init__(self, model: ModelOutline) -> None:
        self.model: Computing = model
        self.masks = GrammarMasks.none("an encode node does not generate")

    def mark_urgent(self) -> None:
        """Do nothing: there are no steps."""

    def copy_block(self, source: int, target: int) -> None:
        raise AssertionError("an encode node shares no blocks between requests")

    def run(
        self, slices: Sequence[Slice], keep_going: KeepGoing = always, halfway: SuspendedPass | None = None
    ) -> Sequence[Outcome]:
        raise AssertionError("an encode node computes no steps")


def assemble_encode_node(
    settings: WorkerSettings,
    source: ModelSource,
    device: torch.device,
    progress: Callable[[float], None] | None = None,
) -> EngineParts:
    """Load the vision tower and make the pool. Raises ConfigError naming the flag to change."""
    _require_plain(settings)
    info = read_info(source, settings.model_impl, settings.max_model_len)
    if info is None:
        raise ConfigError(
            f"{source.name} has no plain weights for kvferry's own decoder, which encode nodes need; start none, and "
            "the nodes that compute prompts encode",
            param="model",
        )
    ops = select(settings.kernels, device, batch_invariant=settings.batch_invariant)
    own = auto_dtype(device, compiled=ops.name == "cpu")
    model = ModelOutline(info, own if settings.dtype == "auto" else getattr(torch, settings.dtype), device, ops)
    media = load_media(replace(settings, mm_processor_cache_gb=0.0), source, model.dtype, device)  # the pool keeps rows
    if media is None:
        raise ConfigError(f"prompts of {source.name} contain only text: there is nothing to encode", param="model")
    if progress is not None:
        progress(1.0)
    kept = cache_format(settings.kv_cache_dtype, batch_invariant=settings.batch_invariant)
    layout = info.layout(model.dtype if kept is None else getattr(torch, kept), settings.block_size)
    num_blocks = pool_blocks(settings, layout.block_bytes, device)
    kv = make_pool(layout, num_blocks, device)
    fingerprint = layout.fingerprint(info.revision, arithmetic(settings, model, ops), info.state_floats)
    config = EngineConfig(fingerprint, settings.block_size, info.max_model_len, Limits(1, 1, 1), takes=())
    pool = BlockPool(num_blocks, Ledger(num_blocks))
    engine = Engine(config, NoSteps(model), pool, None, media.encoder, media.embeddings)
    size = num_blocks * layout.block_bytes / GIB
    log.info("the vision tower of %s on %s, %.2f GiB for embeddings", info.name, device, size)
    return EngineParts(engine, kv, info, layout, fingerprint, info.max_model_len, media=media)


def _require_plain(settings: WorkerSettings) -> None:
    """Raise ConfigError if a setting is on that an encode node does not support."""
    for flag, refused in (
        ("quantization", settings.quantization == "int8"),
        ("tensor_parallel_size", settings.tensor_parallel_size > 1),
        ("load_format", settings.load_format == "dummy"),
        ("enable_prefix_caching", not settings.enable_prefix_caching),
    ):
        if refused:
            raise ConfigError(f"encode nodes do not support this value of --{flag.replace('_', '-')}", param=flag)
