"""Decoder and loader that Gemma 3n and 4 share: layers differ in shape and may read another layer's K/V."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvferry.engine.models.base import KeepGoing, SuspendedPass
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.models.layer_inputs import LayerInputs, read_inputs
from kvferry.engine.models.parameters import ParameterLoader, Parameters
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.decoder_spec import Gqa, Latent
from kvferry.kernels.decoder_step import always
from kvferry.kernels.linear import Linear
from kvferry.kernels.pool_views import layer_view
from kvferry.model_files.layer_shapes import LayerShapes


@dataclass(frozen=True, slots=True)
class ShapedParameters(Parameters):
    """Parameters of such a decoder. inputs: of its layers, or None."""

    inputs: LayerInputs | None = None


class ShapedDecoder(Decoder):
    """Decoder with attention by `LayerShapes`. `parameters` are `ShapedParameters`."""

    parameters: ShapedParameters

    @property
    def shapes(self) -> LayerShapes:
        """Return the shapes of the layers."""
        assert self.config.shapes is not None
        return self.config.shapes

    def dense_layers(self) -> Iterator[Linear]:
        if (inputs := self.parameters.inputs) is not None:
            yield inputs.projection
        yield from super().dense_layers()

    def _one_by_one(
        self,
        token_ids: torch.Tensor,
        kv: torch.Tensor,
        plan: BatchPlan,
        keep_going: KeepGoing = always,
        halfway: SuspendedPass | None = None,
    ) -> torch.Tensor:
        """Compute the layers; those that write no K/V only for tokens whose hidden states are read."""
        end, count = self.shapes.sharing, len(self.parameters.layers)
        if end == count or plan.last is None or plan.adapted or len(plan.last) == plan.num_tokens:
            return super()._one_by_one(token_ids, kv, plan, keep_going, halfway)
        inputs = self._layer_inputs(token_ids)
        whole = self._layers(halfway or self._begun(token_ids, plan), end, kv, plan, inputs, keep_going)
        hidden = torch.zeros(len(token_ids), self.config.hidden_size, dtype=self.dtype, device=self.device)
        if plan.last:
            tokens, last_plan = plan.of_last()
            inputs = None if inputs is None else inputs[tokens]
            begin = SuspendedPass(whole.layer, whole.x[tokens], whole.residual[tokens])
            hidden[tokens] = self._layers(begin, count, kv, last_plan, inputs, always).x
        return hidden

    def _layer_inputs(self, token_ids: torch.Tensor) -> torch.Tensor | None:
        if (inputs := self.parameters.inputs) is None:
            return None
        return inputs.of(token_ids, self.parameters.embedding.rows(token_ids), self._normed)

    def _view(self, kv: torch.Tensor, index: int, plan: BatchPlan) -> torch.Tensor:
        return layer_view(kv, self.shapes.place(index), self.info.layers, plan.block_size)

    def _attention(self, index: int, x: torch.Tensor, kv_layer: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        ops, shapes, own = self.ops, self.shapes, self.parameters.layers[index].attention
        assert isinstance(own, Gqa)
        heads, dim = shapes.kv_heads[index], shapes.head_dims[index]
        made = self._dense(own.qkv, index, "qkv", x, plan).view(len(x), -1, dim)
        q, k, v = made[:, : self.config.num_heads], None, None
        if not shapes.shares(index):
            k, v = made[:, self.config.num_heads :][:, :heads], made[:, -heads:]
            k, v = self._normed(k, own.k_norm), self._normed(v, own.v_norm)
        cos, sin = self._rotations.tables(plan, windowed=own.window != 0)
        q = ops.rope_and_cache(self._normed(q, own.q_norm), k, v, cos, sin, kv_layer, plan)
        out = ops.paged_attention(q, kv_layer, plan, self._scale, own.window)
        return self._dense(own.o, index, "o", out.flatten(1), plan)


class ShapedLoader(ParameterLoader):
    """Loader of such a decoder's parameters. Raises ConfigError as its reader does."""

    @property
    def shapes(self) -> LayerShapes:
        """Return the shapes of the layers."""
        assert self._config.shapes is not None
        return self._config.shapes

    def load(self) -> ShapedParameters:
        own = super().load()
        inputs = read_inputs(self._reader, self.shapes)
        return ShapedParameters(own.embedding, own.layers, own.norm, own.head, inputs)

    def _attention(self, index: int, prefix: str) -> Gqa | Latent:
        config, reader, shapes = self._config, self._reader, self.shapes
        dim, kv = shapes.head_dims[index], shapes.head_dims[index] * shapes.kv_heads[index]
        writes, width = not shapes.shares(index), config.num_heads * dim
        parts = [("q_proj", width)]
        if writes:
            parts += [("k_proj", kv)] + [("v_proj", kv)] * shapes.own_values[index]
        return Gqa(
            qkv=reader.dense(prefix, parts, config.hidden_size, config.qkv_bias),
            q_norm=reader.rms_norm(f"{prefix}.q_norm", dim),
            k_norm=reader.rms_norm(f"{prefix}.k_norm", dim) if writes else None,
            v_norm=reader.ones(dim) if writes else None,
            o=reader.dense(prefix, [("o_proj", config.hidden_size)], width, config.o_bias),
            rotated=True,
            window=config.windows[index],
        )

    def _width(self, index: int) -> int:
        return self.shapes.widths[index]
