"""Whisper's decoder over the paged KV cache: every token is a decode row with a block table of its own.

Rows of one window's prompt share a table and differ in length, so the attention of a row has the same arithmetic in
every batch. Keys and values of the encoder's output lie in further blocks of the pool; each row attends to all of
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvferry.engine.speech.modules import EPS, CrossAttention, DecoderLayer, ModuleReader, SelfAttention
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.ops import Ops
from kvferry.model_files.speech_config import SpeechConfig

AttentionScores = list[torch.Tensor]
"""Scores of alignment heads, each float32 [row, position], not normalised."""


@dataclass(frozen=True, slots=True)
class Row:
    """One token of a step. text: blocks of the window's tokens. audio: blocks of the encoder's output."""

    token: int
    position: int
    text: Sequence[int]
    audio: Sequence[int]


class Decoder:
    """Decoder of many windows at once. kv: the pool [block, layer, plane, head, slot, dim]."""

    def __init__(self, reader: ModuleReader, config: SpeechConfig, ops: Ops, kv: torch.Tensor) -> None:
        self._config, self._ops, self._kv = config, ops, kv
        self._heads, self._dim = config.decoder_heads, config.width // config.decoder_heads
        self._vocabulary = reader.vocabulary("decoder.embed_tokens", config.vocab_size)
        self._places = reader.tensor("decoder.embed_positions.weight", config.context, config.width)
        self._layers = [
            DecoderLayer(
                reader.self_attention(name), reader.cross_attention(name), reader.mlp(name, config.decoder_mlp)
            )
            for name in (f"decoder.layers.{index}" for index in range(config.decoder_layers))
        ]
        self._norm = reader.norm("decoder.layer_norm")

    @property
    def device(self) -> torch.device:
        """Return the device of the pool."""
        return self._kv.device

    def store(self, audio: torch.Tensor, blocks: Sequence[int]) -> None:
        """Write keys and values of the encoder's output [positions, width] of all layers into these blocks."""
        audio = audio.to(self._places.dtype)
        length, slots = len(audio), self._kv.shape[4]
        ids = torch.tensor(blocks, device=self._kv.device)
        padded = audio.new_zeros(len(blocks) * slots, 2 * self._heads * self._dim)
        for index, layer in enumerate(self._layers):
            padded[:length] = layer.cross.kv(audio)
            parts = padded.view(len(blocks), slots, 2, self._heads, self._dim)
            self._kv[:, index].index_copy_(0, ids, parts.permute(0, 2, 3, 1, 4).to(self._kv.dtype))

    def hidden(self, rows: Sequence[Row], scores: AttentionScores | None = None) -> torch.Tensor:
        """Return hidden states [row, width] after the last norm; writes the rows' keys and values.

        A row sees the tokens of its window up to its own: those before it in the same step, too. scores: gets those
        of some heads, if all rows are of one window."""
        own, audio = self._plans(rows)
        ids = torch.tensor([row.token for row in rows], device=self._kv.device)
        x = self._vocabulary.rows(ids).to(self._places.dtype) * self._config.embedding_scale
        x = x + self._places[own.positions]
        for index, layer in enumerate(self._layers):
            pool = self._kv[:, index]
            x = x + self._attend(x, layer.attention, pool, own)
            q = self._queries(x, layer.cross)
            if scores is not None:
                self._score(scores, index, q, pool, rows[0].audio)
            x = x + layer.cross.out(self._ops.paged_attention(q, pool, audio, self._scale).flatten(1))
            x = layer.mlp.add_to(x, self._ops)
        return self._ops.layer_norm(x, self._norm, EPS)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [n, vocabulary] of hidden states."""
        return self._vocabulary.logits(hidden)

    def _score(
        self, scores: AttentionScores, index: int, q: torch.Tensor, pool: torch.Tensor, audio: Sequence[int]
    ) -> None:
        """Add the scores of this layer's alignment heads."""
        blocks = torch.tensor(audio, device=pool.device)
        for layer, head in self._config.alignment_heads:
            if layer == index:
                keys = pool[blocks, 0, head].flatten(0, 1)[: self._config.positions]
                scores.append((q[:, head].float() @ keys.float().T) * self._scale)

    @property
    def _scale(self) -> float:
        return float(self._dim**-0.5)

    def _attend(self, x: torch.Tensor, own: SelfAttention, pool: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        qkv = own.qkv(self._ops.layer_norm(x, own.norm, EPS)).view(len(x), 3, self._heads, self._dim)
        q, k, v = qkv.unbind(1)
        q = self._ops.rope_and_cache(q, k, v, None, None, pool, plan)
        return own.out(self._ops.paged_attention(q, pool, plan, self._scale).flatten(1))

    def _queries(self, x: torch.Tensor, cross: CrossAttention) -> torch.Tensor:
        return cross.q(self._ops.layer_norm(x, cross.norm, EPS)).view(len(x), self._heads, self._dim)

    def _plans(self, rows: Sequence[Row]) -> tuple[BatchPlan, BatchPlan]:
        """Return the plans of the rows' own tokens and of the audio that they listen to."""
        size = self._kv.shape[4]
        slots = [row.text[row.position // size] * size + row.position % size for row in rows]
        own = self._plan([row.position for row in rows], slots, [row.text for row in rows])
        last = self._config.positions - 1
        return own, self._plan([last] * len(rows), [-1] * len(rows), [row.audio for row in rows])

    def _plan(self, positions: list[int], slots: list[int], tables: Sequence[Sequence[int]]) -> BatchPlan:
        device, count = self._kv.device, len(positions)
        lengths = tuple(position + 1 for position in positions)
        return BatchPlan(
            positions=torch.tensor(positions, device=device),
            slots=torch.tensor(slots, device=device),
            block_table=torch.tensor([list(table) for table in tables], dtype=torch.int32, device=device),
            query_start=torch.arange(count + 1, dtype=torch.int32, device=device),
            total_len=torch.tensor(lengths, dtype=torch.int32, device=device),
            query_lens=(1,) * count,
            total_lens=lengths,
            num_decodes=count,
            block_size=self._kv.shape[4],
            chained=True,
        )
