"""Machine: hardware model of one simulated node: rates of compute, link and tiers, and pool sizes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvferry.protocol.errors import ConfigError
from kvferry.protocol.layout import blocks_for


@dataclass(frozen=True, slots=True)
class Machine:
    """One node with one model. Raises ConfigError for a field out of bounds.

    prefill_tokens_per_s  of a short prompt
    attention_len         prompt position at which a token costs twice as much, because of attention; 0: never
    step_s, stream_s      seconds of a decode step: a constant, and what each stream adds
    context_s             seconds that each token of the streams' contexts adds to a step
    chunk_tokens          prompt tokens that a step computes beside running streams
    ship_bytes_per_s      of a node's link, in each direction
    block_size            tokens per KV block; a larger one than the cluster's makes a simulation faster
    block_bytes, blocks   of the pool
    page_blocks, window_pages   blocks of a page of layers with windows, and pages that a sequence holds at most; or 0
    max_num_seqs          concurrent streams
    host_blocks, disk_blocks    capacity of the host and disk tiers (`--kv-host-gib`, `--kv-disk-gib`)
    host_block_s, disk_block_s  seconds to read a block from there
    media_tokens_per_s    tokens of images and audio that a node encodes
    audio_tokens_per_s    tokens that stand for a second of audio
    media_row_bytes, media_cache_tokens   of an encoded token, and tokens whose rows a node keeps
    overhead_s            of a request before its first token, beside queues and computing: router, messages, network
    beside                share of its speed that a prefill node keeps while streams run on a decode node on the same
                          cores, as with `serve`; the streams have the rest; 1: cores of its own"""

    prefill_tokens_per_s: float = 8_000.0
    attention_len: int = 32_768
    step_s: float = 0.015
    stream_s: float = 0.000_1
    context_s: float = 0.000_000_05
    chunk_tokens: int = 512
    ship_bytes_per_s: float = 20e9
    block_size: int = 64
    block_bytes: int = 64 * 163_840
    blocks: int = 3000
    page_blocks: int = 0
    window_pages: int = 0
    max_num_seqs: int = 128
    host_blocks: int = 0
    host_block_s: float = 0.000_5
    disk_blocks: int = 0
    disk_block_s: float = 0.003_5
    media_tokens_per_s: float = 8_000.0
    audio_tokens_per_s: float = 25.0
    media_row_bytes: int = 8_192
    media_cache_tokens: int = 131_072
    overhead_s: float = 0.0
    beside: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least, most = getattr(self, field.name), LEAST.get(field.name, 1e-9), MOST[field.name]
            if not least <= value <= most:
                raise ConfigError(f"{field.name} must be from {least:g} to {most:g}, not {value}", param=field.name)

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that a sequence of `tokens` tokens takes, including those of its windows."""
        chain = blocks_for(tokens, self.block_size)
        return chain + self.page_blocks * min(chain, self.window_pages)

    def work(self, start: int, end: int) -> float:
        """Return the work of computing a prompt's tokens from start to end, in tokens of a short prompt."""
        more = (end * end - start * start) / (2 * self.attention_len) if self.attention_len else 0.0
        return end - start + more

    def encode_work(self, tokens: int) -> float:
        """Return the work of encoding tokens of media, in tokens of a short prompt."""
        return tokens * self.prefill_tokens_per_s / self.media_tokens_per_s

    def compute_s(self, start: int, end: int) -> float:
        """Return the seconds to compute a prompt's tokens from start to end."""
        return self.work(start, end) / self.prefill_tokens_per_s

    def decode_s(self, streams: int, context: float) -> float:
        """Return the seconds of a decode step with `streams` streams and `context` context tokens in total."""
        return self.step_s + self.stream_s * streams + self.context_s * context


LEAST = {
    "attention_len": 0, "stream_s": 0.0, "context_s": 0.0, "chunk_tokens": 1, "block_size": 1, "block_bytes": 1,
    "blocks": 1, "page_blocks": 0, "window_pages": 0,
    "max_num_seqs": 1, "host_blocks": 0, "disk_blocks": 0, "overhead_s": 0.0, "beside": 0.01,
    "media_row_bytes": 1, "media_cache_tokens": 0,
}  # fmt: skip
"""Lower bounds of fields that may be zero or are counts; 1e-9 for others."""

MOST = {
    "prefill_tokens_per_s": 1e9, "attention_len": 1e9, "step_s": 3600.0, "stream_s": 3600.0, "context_s": 3600.0,
    "chunk_tokens": 1e6, "ship_bytes_per_s": 1e15, "block_size": 1e6, "block_bytes": 1e12, "blocks": 1e7,
    "page_blocks": 1e4, "window_pages": 1e6,
    "max_num_seqs": 1e6, "host_blocks": 1e8, "host_block_s": 3600.0, "disk_blocks": 1e9, "disk_block_s": 3600.0,
    "media_tokens_per_s": 1e9, "audio_tokens_per_s": 1e4, "media_row_bytes": 1e6, "media_cache_tokens": 1e9,
    "overhead_s": 3600.0, "beside": 1.0,
}  # fmt: skip
"""Upper bounds: beyond them the floating-point clock stops advancing, or a pool exceeds memory."""


LARGE = Machine()
"""Large model on a few large GPUs."""
