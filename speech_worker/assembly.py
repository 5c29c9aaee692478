"""Construction of a speech node's model from settings: Whisper's encoder and decoder, KV pool and engine loop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvferry.engine.speech.loading import Formats, load_whisper
from kvferry.engine.speech.log_mel import LogMel
from kvferry.engine.speech.loop import SpeechLoop
from kvferry.engine.speech.transcriber import SpeechModel
from kvferry.kernels.ops import select
from kvferry.model_files.read_errors import naming
from kvferry.model_files.source import ModelSource, resolve
from kvferry.model_files.speech_config import SpeechConfig, read_speech_config
from kvferry.model_files.tokenizer import TextTokenizer
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.layout import KVLayout, blocks_for
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker.engine_factory import choose_device
from kvferry.worker.pool_memory import GIB, available_bytes, make_pool, pool_blocks

log = logging.getLogger("kvferry.worker")


@dataclass(frozen=True, slots=True)
class SpeechParts:
    """Speech model whose thread is not started, with the facts that its node announces."""

    model: SpeechModel
    source: ModelSource
    layout: KVLayout
    fingerprint: str
    device: torch.device


def assemble_speech(settings: WorkerSettings, progress: Callable[[float], None] | None = None) -> SpeechParts:
    """Load the model, build pool and engine. Raises ConfigError naming the flag to change."""
    _require_plain(settings)
    device = choose_device(settings.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    source = resolve(settings.model)
    config = read_speech_config(source)
    ops = select(settings.kernels, device, graphs=False)
    formats = Formats.of(settings.dtype, device, ops)
    layout = _layout(config, formats.decoder, settings.block_size)
    text, audio = blocks_for(config.context, settings.block_size), blocks_for(config.positions, settings.block_size)
    blocks = pool_blocks(settings, layout.block_bytes, device, available_bytes(device))
    if blocks < text + audio:
        raise ConfigError(
            f"the KV pool has {blocks} blocks, and a window of speech takes {text + audio}; raise --kv-cache-gib",
            param="kv_cache_gib",
        )
    blocks = min(blocks, settings.max_num_seqs * (text + audio))
    kv = make_pool(layout, blocks, device)
    with naming(source.name):
        encoder, decoder, batch = load_whisper(source, config, formats, ops, kv, progress)
    loop = SpeechLoop(encoder, decoder, batch, blocks=blocks, text_blocks=text, audio_blocks=audio)
    log.info(
        "%s, encoder in %s, decoder in %s on %s, %d KV blocks of %d tokens (%.2f GiB), ops %s",
        source.name, _name(formats.encoder), _name(formats.decoder), device, blocks, settings.block_size,
        blocks * layout.block_bytes / GIB, ops.name,
    )  # fmt: skip
    fingerprint = layout.fingerprint(source.revision, f"speech {_name(formats.encoder)} {_name(formats.decoder)}")
    tokenizer = TextTokenizer.from_directory(source.path).library
    model = SpeechModel(config, tokenizer, LogMel(config.mels, torch.device("cpu")), loop)
    return SpeechParts(model, source, layout, fingerprint, device)


def _layout(config: SpeechConfig, dtype: torch.dtype, block_size: int) -> KVLayout:
    heads = config.decoder_heads
    return KVLayout(config.decoder_layers, heads, config.width // heads, _name(dtype), block_size)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _require_plain(settings: WorkerSettings) -> None:
    """Raise ConfigError if a setting is on that only language models support."""
    for flag, refused in (
        ("load_format", settings.load_format == "dummy"),
        ("quantization", settings.quantization == "int8"),
        ("kv_cache_dtype", settings.kv_cache_dtype != "auto"),
        ("batch_invariant", settings.batch_invariant),
        ("tensor_parallel_size", settings.tensor_parallel_size > 1),
        ("enable_expert_parallel", settings.enable_expert_parallel),
        ("speculative_model", bool(settings.speculative_model)),
        ("lora", bool(settings.lora)),
        ("elastic", settings.elastic),
        ("enable_scale_out", settings.enable_scale_out),
    ):
        if refused:
            name = flag.replace("_", "-")
            raise ConfigError(f"--{name} needs a language model; the model transcribes speech", param=flag)
