"""Quantisation method of a Hugging Face checkpoint: GPTQ, AWQ, fp8 or compressed-tensors, from config.json.

The names of the tensors show which layers are quantised, and how each is stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvferry.model_files.multimodal import text_config
from kvferry.protocol.errors import ConfigError

GPTQ, AWQ, FP8, COMPRESSED = "gptq", "awq", "fp8", "compressed-tensors"
SUPPORTED = "GPTQ of 2, 3, 4 and 8 bits, AWQ of 4 bits (gemm), fp8 and compressed-tensors (int4, int8, fp8)"
_FP8_NAMES = ("fp8", "fbgemm_fp8")
_OTHER_ROOMS = ("mxfp4",)
"""Methods that single families read themselves."""
_COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Quantisation of a checkpoint.

    bits: size of a code. group: number of inputs that share a scale; 0: all of an output's. symmetric: codes have no
    zero points. ordered: inputs belong to groups in an order of their own. block: outputs and inputs of a square that
    shares a scale. zero: added to zero points when they are stored."""

    method: str
    bits: int
    group: int = 0
    symmetric: bool = True
    ordered: bool = False
    block: tuple[int, int] | None = None
    zero: int = 0

    def describe(self) -> str:
        """Return the quantisation in words."""
        blocks = f", blocks of {self.block[0]} x {self.block[1]}" if self.block else ""
        groups = f", groups of {self.group}" if self.group else ""
        bits = "" if self.method == FP8 else f" of {self.bits} bits"
        return f"{self.method}{bits}{blocks}{groups}{', in the order of activations' if self.ordered else ''}"


def quantisation(config: dict[str, Any]) -> Quantisation | None:
    """Return the quantisation of a config.json; None: plain weights, or a family's own storage.

    Raises ConfigError that names the method and what is supported."""
    text = text_config(config)
    names = ("quantization_config", "compression_config")
    given = next((place[name] for place in (config, text) for name in names if place.get(name)), None)
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ConfigError("config.json: quantization_config is not an object", param="model")
    method = str(given.get("quant_method") or "unnamed")
    if method in _OTHER_ROOMS:
        return None
    try:
        return _parse(method, given)
    except (TypeError, ValueError, AttributeError) as error:
        raise _unsupported(method, f"an invalid quantization_config ({error})") from error


def _parse(method: str, given: dict[str, Any]) -> Quantisation:
    if method == GPTQ:
        return _gptq(given)
    if method == AWQ:
        return _awq(given)
    if method in _FP8_NAMES:
        return Quantisation(FP8, 8, block=_block(method, given.get("weight_block_size")))
    if method == COMPRESSED:
        return _compressed(given)
    raise _unsupported(method, "that method")


def _gptq(given: dict[str, Any]) -> Quantisation:
    bits, layout = int(given.get("bits", 4)), str(given.get("checkpoint_format") or "gptq")
    if bits not in (2, 3, 4, 8):
        raise _unsupported(GPTQ, f"{bits} bits")
    if layout not in ("gptq", "gptq_v2") or given.get("is_marlin_format"):
        raise _unsupported(GPTQ, f"the layout {layout if layout != 'gptq' else 'marlin'!r:.80}")
    symmetric, ordered = bool(given.get("sym", True)), bool(given.get("desc_act", False))
    return Quantisation(GPTQ, bits, _group(given), symmetric, ordered, zero=int(layout == "gptq"))


def _awq(given: dict[str, Any]) -> Quantisation:
    bits = int(given.get("bits") or given.get("w_bit") or 4)
    layout = str(given.get("version") or "gemm").lower()
    if bits != 4:
        raise _unsupported(AWQ, f"{bits} bits")
    if layout != "gemm":
        raise _unsupported(AWQ, f"the layout {layout!r:.80}")
    if not given.get("zero_point", True):
        raise _unsupported(AWQ, "a checkpoint without zero points")
    return Quantisation(AWQ, bits, _group(given), symmetric=False)


def _compressed(given: dict[str, Any]) -> Quantisation:
    """Return the group of layers that takes most memory; each layer's own tensors show the rest."""
    if (given.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _unsupported(COMPRESSED, "sparse weights")
    found = list(_schemes(given))
    if not found:
        raise _unsupported(COMPRESSED, "a checkpoint without config_groups")
    return max(found, key=lambda each: (each.bits, not each.symmetric))


def _schemes(given: dict[str, Any]) -> Iterator[Quantisation]:
    for group in (given.get("config_groups") or {}).values():
        layout, weights = str(group.get("format") or given.get("format") or "pack-quantized"), group.get("weights")
        if not weights:
            raise _unsupported(COMPRESSED, "a group of layers whose weights are not quantised")
        bits, kind = int(weights.get("num_bits", 8)), str(weights.get("type", "int"))
        if layout not in _COMPRESSED_FORMATS:
            raise _unsupported(COMPRESSED, f"the format {layout!r:.80}")
        if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
            raise _unsupported(COMPRESSED, f"{kind}{bits} weights")
        yield Quantisation(
            COMPRESSED,
            bits,
            max(0, int(weights.get("group_size") or 0)),
            bool(weights.get("symmetric", True)),
            weights.get("actorder") in ("group", "dynamic", True),
            _block(COMPRESSED, weights.get("block_structure")),
        )


def _group(given: dict[str, Any]) -> int:
    size = given.get("group_size", given.get("q_group_size", 128))
    return max(0, int(size))


def _block(method: str, given: Any) -> tuple[int, int] | None:
    if not given:
        return None
    rows, columns = map(int, given)
    if min(rows, columns) < 1:
        raise _unsupported(method, f"blocks of {rows} x {columns}")
    return rows, columns


def _unsupported(method: str, feature: str) -> ConfigError:
    return ConfigError(
        f"its weights are quantised by {method!r:.80}, and {feature} is not supported; {SUPPORTED} are", param="model"
    )
