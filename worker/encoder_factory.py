"""Construction of the engine of a text encoder (embedding or classification model) from settings.

An encoder keeps no KV, but the engine expects a block per request. Each text of a step therefore holds one block of a
pool that takes almost no memory. A block has more slots than the longest text has tokens, so no block is ever full,
cached or shipped, and the rest of the engine works unchanged."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.budget import Limits
from kvferry.engine.encoder_runner import EncoderRunner
from kvferry.engine.engine import Engine, EngineConfig
from kvferry.engine.ledger import Ledger
from kvferry.engine.models.dense_modules import load_dense
from kvferry.engine.models.hf_encoder import load_encoder
from kvferry.engine.models.loader import auto_dtype
from kvferry.engine.pooling import Pooler
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.pooling_config import PoolingConfig
from kvferry.model_files.source import ModelSource
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import WorkerSettings
from kvferry.protocol.work import Classify, Embed
from kvferry.worker.engine_parts import EngineParts, arithmetic
from kvferry.worker.pool_memory import make_pool

log = logging.getLogger("kvferry.worker")

CPU_TOKENS, GPU_TOKENS = 1024, 16_384
"""Default token budget of a step on a CPU and on a GPU.

It is larger than a decoder's, since no token stream waits for the step."""


def assemble_encoder(
    settings: WorkerSettings,
    source: ModelSource,
    task: PoolingConfig,
    device: torch.device,
    progress: Callable[[float], None] | None = None,
) -> EngineParts:
    """Load the encoder and build its engine. Raises ConfigError naming the flag to change."""
    _require_plain(settings)
    dtype = auto_dtype(device, compiled=False) if settings.dtype == "auto" else getattr(torch, settings.dtype)
    classifies = task.kind == "classify"
    ops = ReferenceOps()
    model = load_encoder(source, classifies=classifies, device=device, dtype=dtype, ops=ops, progress=progress)
    info = model.info
    if settings.max_model_len > info.max_model_len:
        raise ConfigError(f"the model supports at most {info.max_model_len} tokens; lower --max-model-len")
    longest = settings.max_model_len or info.max_model_len
    layout = info.layout(torch.float32, longest + 1)
    blocks = max(2, settings.max_num_seqs)
    kv = make_pool(layout, blocks, device)
    fingerprint = layout.fingerprint(info.revision, arithmetic(settings, model, ops))
    budget = settings.max_num_batched_tokens or (GPU_TOKENS if device.type == "cuda" else CPU_TOKENS)
    limits = Limits(budget, budget, settings.max_num_seqs, whole=True)
    takes = (Classify,) if classifies else (Embed,)
    config = EngineConfig(fingerprint, layout.block_size, longest, limits, takes)
    runner = EncoderRunner(model, Pooler(load_dense(source, task.dense, device)))
    engine = Engine(config, runner, BlockPool(blocks, Ledger(blocks), prefix_caching=False))
    log.info("%s, an encoder in %s on %s", info.name, str(model.dtype).removeprefix("torch."), device)
    return EngineParts(engine, kv, info, layout, fingerprint, longest)


def _require_plain(settings: WorkerSettings) -> None:
    """Raise ConfigError if a setting is on that only decoders support."""
    for flag, refused in (
        ("quantization", settings.quantization == "int8"),
        ("batch_invariant", settings.batch_invariant),
        ("tensor_parallel_size", settings.tensor_parallel_size > 1),
        ("enable_expert_parallel", settings.enable_expert_parallel),
    ):
        if refused:
            name = flag.replace("_", "-")
            raise ConfigError(f"--{name} needs a decoder; the model is an encoder", param=flag)
