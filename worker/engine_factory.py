"""Construction of a decoder's engine from settings: device, model, KV pool, limits, draft model and canary."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from math import inf

import torch

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.budget import Limits
from kvferry.engine.canary import Canary
from kvferry.engine.engine import Engine, EngineConfig
from kvferry.engine.ledger import Ledger
from kvferry.engine.models.base import ModelInfo
from kvferry.engine.models.dense_modules import load_dense
from kvferry.engine.output_tolerance import tolerance
from kvferry.engine.pooling import Pooler
from kvferry.engine.prefault import Prefault, Region
from kvferry.engine.runner import Runner
from kvferry.engine.shared_cores.core_lock import CoreLock
from kvferry.engine.shared_cores.core_turns import CoreTurns
from kvferry.kernels.cpu import CpuOps
from kvferry.kernels.ops import select
from kvferry.model_files.draft_model import resolve_draft
from kvferry.model_files.pooling_config import read_task
from kvferry.model_files.source import read_facts
from kvferry.model_files.unsupported_models import resolve_runnable
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker.adapters import read_first
from kvferry.worker.batch_invariance import require_batch_invariance
from kvferry.worker.draft_factory import draft_layout, draft_rows, make_draft
from kvferry.worker.encode_factory import assemble_encode_node
from kvferry.worker.encoder_factory import assemble_encoder
from kvferry.worker.engine_parts import EngineParts, arithmetic
from kvferry.worker.grammar_masks import make_masks
from kvferry.worker.kv_format import kv_format
from kvferry.worker.largest_step import draft_chunk, largest_steps
from kvferry.worker.link_check import check_device_link
from kvferry.worker.media_loading import load_media
from kvferry.worker.memory_profile import available_to_pool, start_profiler
from kvferry.worker.model_loading import load
from kvferry.worker.pool_memory import GIB, make_pool, pool_blocks
from kvferry.worker.rank_launcher import start_ranks
from kvferry.worker.recurrent_states import (
    checked_states,
    count_rows,
    make_states,
    require_no_ranks,
    require_room,
    rows_bytes,
    rows_in_use,
)
from kvferry.worker.window_layers import divide, longest_chain, pool_tokens

log = logging.getLogger("kvferry.worker")


def assemble(settings: WorkerSettings, progress: Callable[[float], None] | None = None) -> EngineParts:
    """Load the model, build the KV pool and the engine. Raises ConfigError naming the flag to change."""
    device = choose_device(settings.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        refuse_expandable_segments(os.environ)
        check_device_link(settings, device)
    source = resolve_runnable(settings.model, settings.load_format)
    if settings.role == "encode":
        return assemble_encode_node(settings, source, device, progress)
    task = read_task(source, "last")
    if task.kind == "transcribe":
        raise ConfigError("a model that transcribes speech has only decode nodes: kvferry decode", param="model")
    if task.encoder:
        if settings.load_format == "dummy":
            raise ConfigError("dummy weights are supported for decoders only", param="load_format")
        return assemble_encoder(settings, source, task, device, progress)
    graphs = not settings.enforce_eager and settings.tensor_parallel_size == 1
    ops = select(settings.kernels, device, batch_invariant=settings.batch_invariant, graphs=graphs)
    decodes = settings.role == "decode" or settings.elastic
    drafting = resolve_draft(settings, source) if decodes else None
    ranks = start_ranks(settings, device, source.revision)
    profiler = start_profiler(settings, device)
    model = load(
        settings, source, device, ops, progress, settings.weights_fd, ranks.part if ranks is not None else None
    )
    if ranks is not None:
        model = ranks.wait_loaded(model)
    else:
        divide(settings, model)
    require_no_ranks(settings, model.info)
    media = load_media(settings, source, model.dtype, device)
    if settings.batch_invariant:
        require_batch_invariance(model)
    small = load(settings, drafting, device, ops) if drafting is not None else None
    kv_dtype = kv_format(settings, model, small)
    dtype = kv_dtype or model.dtype
    layout = model.info.layout(dtype, settings.block_size)
    small_layout = draft_layout(small, settings.block_size, kv_dtype)
    beside = small_layout.block_bytes if small_layout is not None else 0
    adapters = read_first(settings, model)
    limits = step_limits(settings, device, ops.instruction_set if isinstance(ops, CpuOps) else "")
    steps = largest_steps(settings, limits, (model, layout), (small, small_layout), [each for _, each in adapters])
    available = available_to_pool(profiler, ranks, steps, graphs=graphs, beside=beside)
    state_rows = count_rows(settings, model.info, available)
    available -= rows_bytes(model.info, state_rows)
    drafting_rows = draft_rows(small, settings, available)
    available -= rows_bytes(small.info, drafting_rows) if small is not None else 0
    num_blocks = pool_blocks(settings, layout.block_bytes + beside, device, available, measured=profiler is not None)
    kv = ranks.make_pool(layout, num_blocks) if ranks is not None else make_pool(layout, num_blocks, device)
    room = longest_chain(layout, num_blocks - require_room(model.info, layout, num_blocks), limits)
    max_model_len = longest_sequence(settings, model.info, room)
    fingerprint = layout.fingerprint(model.info.revision, arithmetic(settings, model, ops), model.info.state_floats)
    shares = settings.cores_fd >= 0 and device.type == "cpu"
    config = EngineConfig(
        fingerprint, settings.block_size, max_model_len, limits,
        shares_cores=shares and decodes, drafts=settings.num_speculative_tokens,
    )  # fmt: skip
    pool = BlockPool(num_blocks, Ledger(num_blocks), prefix_caching=settings.enable_prefix_caching)
    pooler = Pooler(load_dense(source, task.dense, device))
    masks = make_masks(source, model.info.vocab_size)
    core_turns = CoreTurns(CoreLock(settings.cores_fd), settings.itl_target_ms / 1000) if shares else None
    states = make_states(model.info, state_rows, kv, device)
    runner = Runner(model, kv, settings.block_size, masks, pooler, core_turns, states)
    draft = make_draft(
        small, small_layout, num_blocks, state_rows=drafting_rows, prefix_caching=settings.enable_prefix_caching,
        chunk=draft_chunk(limits), vocab_size=model.info.vocab_size, core_turns=core_turns,
    )  # fmt: skip
    encoding = (media.encoder, media.embeddings) if media is not None else (None, None)
    engine = Engine(config, runner, pool, draft, *encoding)
    if decodes and settings.canary_rate:
        tolerated = tolerance(model.dtype, dtype, exact=settings.batch_invariant)
        engine.canary = Canary(
            pool, engine.request_table, runner, engine.events, block_size=settings.block_size,
            rate=settings.canary_rate, tolerated=tolerated, states=checked_states(engine.states, model.info),
        )  # fmt: skip
    if device.type == "cpu":
        engine.prefault = Prefault(
            Region(kv, lambda: 1 - pool.free_blocks / num_blocks), *rows_in_use(engine.states, states)
        )
    for _, adapter in adapters:
        engine.adapters.put(adapter)
    log.info(
        "%s in %s on %s, %d %s KV blocks of %d tokens (%.2f GiB, %d tokens), ops %s",
        model.info.name,
        "+".join([str(model.dtype).removeprefix("torch."), *model.info.revision.split("+")[1:]]),
        device,
        num_blocks,
        layout.dtype,
        settings.block_size,
        num_blocks * layout.block_bytes / GIB,
        pool_tokens(layout, num_blocks, max_model_len),
        f"{ops.name} ({ops.instruction_set}, {ops.threads} threads)" if isinstance(ops, CpuOps) else ops.name,
    )
    names = tuple(name for name, _ in adapters)
    eos = read_facts(source).eos_token_ids if settings.enable_scale_out else ()
    return EngineParts(engine, kv, model.info, layout, fingerprint, max_model_len, names, ranks, eos, media)


def choose_device(name: str) -> torch.device:
    """Return the device of that name; auto: a GPU if torch has one, else the CPU. Raises ConfigError.

    torch uses the name cuda for AMD's GPUs, too."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}", param="device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("torch finds no GPU; use --device cpu", param="device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ConfigError(f"there is no {name}; the last GPU is cuda:{last}", param="device")
    return device


def refuse_expandable_segments(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if PyTorch is configured to use expandable segments.

    Other processes cannot open such memory, so no block could be shipped from GPU to GPU."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in environment.get(name, "").lower().replace(" ", ""):
            raise ConfigError(
                f"{name} sets expandable_segments:True, with which KV blocks cannot be transferred; unset it"
            )


def longest_sequence(settings: WorkerSettings, info: ModelInfo, num_blocks: int) -> int:
    """Return the longest prompt plus output, in tokens, that model and pool allow.

    Raises ConfigError when --max-model-len is larger."""
    room = num_blocks * settings.block_size
    wanted = settings.max_model_len
    if wanted > info.max_model_len:
        raise ConfigError(f"the model supports at most {info.max_model_len} tokens; lower --max-model-len")
    if wanted > room:
        raise ConfigError(f"the KV pool holds {room} tokens; lower --max-model-len or raise --kv-cache-gib")
    if not wanted and room < info.max_model_len:
        log.warning(
            "sequences are limited to the KV pool's %d tokens (the model supports %d)", room, info.max_model_len
        )
    return wanted or min(info.max_model_len, room)


def step_limits(settings: WorkerSettings, device: torch.device, instruction_set: str = "") -> Limits:
    """Return the budgets of one step.

    AMX tiles multiply so fast that a step of 256 tokens mostly waits for weights from memory.

    The token budget fits one token of every running request plus one block of a prompt. A prompt that has started thus
    makes progress under any load."""
    on_gpu = device.type == "cuda"
    budget = settings.max_num_batched_tokens or (8192 if on_gpu else 512 if instruction_set == "amx" else 256)
    beside = settings.max_prefill_tokens_while_decoding or (2048 if on_gpu else 256)
    budget = max(budget, settings.max_num_seqs + settings.block_size)
    beside_s = settings.itl_target_ms / 1000 or inf
    return Limits(budget, min(beside, budget), settings.max_num_seqs, beside_s=beside_s)
