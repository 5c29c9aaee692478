"""ShardWeights: cuts one rank's shard out of a decoder's tensors while they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvferry.engine.models.config import DecoderConfig
from kvferry.engine.models.weights import Weights
from kvferry.engine.ranks.shard import FLAG, Shard
from kvferry.kernels.decoder_spec import Stored, StoredRows
from kvferry.kernels.quantised_codes import Codes
from kvferry.protocol.errors import ConfigError

VOCABULARY = ("embed_tokens", "lm_head")
OUTPUTS = (
    "q_proj", "k_proj", "v_proj", "qkv_proj", "q_b_proj", "kv_b_proj",
    "gate_proj", "up_proj", "gate_up_proj", "w1", "w3",
)  # fmt: skip
"""Dense layers whose outputs are divided among ranks."""
INPUTS = ("o_proj", "down_proj", "w2")
"""Dense layers whose inputs are divided among ranks; their outputs are summed."""
RUN = 32
"""Inputs that share one scale when activations are quantised to int8."""
LARGE = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
"""GGUF quantisations with 256 inputs in a block; the others have 32."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Division of a tensor among ranks along dimension `dim`.

    Along it the tensor consists of stretches of these lengths, and each stretch is divided."""

    dim: int
    wholes: tuple[int, ...]

    def shape(self, own: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole tensor, given the shape `own` of the rank's part."""
        return (*own[: self.dim], sum(self.wholes), *own[self.dim + 1 :])

    def part(self, whole: torch.Tensor, shard: Shard) -> torch.Tensor:
        """Return the rank's part, filled up with zeros where a stretch is too short for the last ranks."""
        parts = []
        for stretch, length in zip(torch.split(whole, list(self.wholes), self.dim), self.wholes, strict=True):
            own = -(-length // shard.ranks)
            first, last = (min(own * rank, length) for rank in (shard.rank, shard.rank + 1))
            parts.append(stretch.narrow(self.dim, first, last - first))
            if last - first < own:
                missing = list(whole.shape)
                missing[self.dim] = own - (last - first)
                parts.append(whole.new_zeros(missing))
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0]


class ShardWeights:
    """Implements `Weights` for the decoder of `shard.of(config)`."""

    def __init__(self, weights: Weights, config: DecoderConfig, shard: Shard) -> None:
        self._weights, self._config, self._shard = weights, config, shard

    def read(self, name: str, out: torch.Tensor) -> None:
        cut = self._cut(name, tuple(out.shape))
        if cut is None:
            self._weights.read(name, out)
        else:
            whole = torch.empty(cut.shape(out.shape), dtype=out.dtype)
            self._weights.read(name, whole)
            out.copy_(cut.part(whole, self._shard))
        if self._shard.rank and name.endswith(tuple(f"{layer}.bias" for layer in INPUTS)) and not self._entire(name):
            out.zero_()  # a bias is added on one rank only

    def stored(self, name: str, shape: tuple[int, int]) -> Stored | None:
        cut = self._cut(name, shape)
        if cut is None:
            return self._weights.stored(name, shape)
        rows = self._weights.stored(name, (cut.shape(shape)[0], cut.shape(shape)[1]))
        if rows is None:
            return None
        if isinstance(rows, Codes):
            return self._codes(name, rows, cut, shape[1])
        if cut.dim == 0:
            return StoredRows(rows.kind, cut.part(rows.data, self._shard).contiguous())
        self._require_whole(name, 256 if rows.kind in LARGE else 32, shape[1])
        return StoredRows(rows.kind, self._columns(rows.data))

    def peaks(self, name: str, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor | None:
        """Return the largest magnitudes of whole rows, of which the rank has a part: see `engine.models.reader.Peaks`.

        Raises ConfigError where the cut would divide a run of inputs that is quantised with one scale."""
        cut = self._cut(name, shape)
        if cut is None or cut.dim == 0:
            return None
        whole = torch.empty(cut.shape(shape), dtype=dtype)
        if whole.shape[1] % RUN == 0:
            self._require_whole(name, RUN, shape[1])
        self._weights.read(name, whole)
        return whole.abs().amax(1)

    def _codes(self, name: str, codes: Codes, cut: Cut, inputs: int) -> Codes:
        codes = codes.by_output()
        if cut.dim == 0:
            values, scales = (cut.part(each, self._shard) for each in (codes.values, codes.scales))
            return Codes(values, scales, codes.block, codes.order)
        if codes.scales.shape[1] == 1:
            return Codes(self._columns(codes.values), codes.scales)
        self._require_whole(name, codes.values.shape[1] if codes.order is not None else codes.group, inputs)
        return Codes(self._columns(codes.values), self._columns(codes.scales), codes.block)

    def _columns(self, rows: torch.Tensor) -> torch.Tensor:
        return Cut(1, (rows.shape[1],)).part(rows, self._shard).contiguous()

    def _require_whole(self, name: str, block: int, inputs: int) -> None:
        """Raise ConfigError if the division among ranks would cut a block."""
        if inputs % block:
            raise ConfigError(
                f"{FLAG} {self._shard.ranks} cuts blocks of {block} inputs of {name}; use --quantization none",
                param=FLAG,
            )

    def _entire(self, name: str) -> bool:
        """Return whether the tensor belongs to an expert that only this rank has."""
        return self._shard.whole_experts and ".experts." in name

    def _cut(self, name: str, own: tuple[int, ...]) -> Cut | None:
        """Return the division of a tensor; None if each rank has all of it. own: shape of this rank's part."""
        if self._entire(name):
            return None
        layer, _, kind = name.rpartition(".")
        last, ranks, config = layer.rpartition(".")[2], self._shard.ranks, self._config
        if last in VOCABULARY:
            return Cut(0, (config.vocab_size,))
        if last in INPUTS and kind == "weight":
            return Cut(1, (own[1] * ranks,))
        if last == "qkv_proj":
            return Cut(0, (config.q_size, config.kv_size, config.kv_size))
        if last == "gate_up_proj":
            return Cut(0, (own[0] // 2 * ranks,) * 2)
        family = config.family
        of_norms = last in ("q_norm", "k_norm") and (family.own_qk_norm or family.wide_qk_norm)
        per_head = kind == "sinks" or of_norms
        return Cut(0, (own[0] * ranks,)) if last in OUTPUTS or per_head else None
