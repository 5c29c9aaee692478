"""Encoder models of transformers and their loader: whole texts in, hidden states or class logits out, no cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.engine.models.base import Computing, ModelInfo
from kvferry.engine.models.hf import transformers_module
from kvferry.kernels.ops import Ops
from kvferry.model_files.source import ModelSource, read_facts
from kvferry.protocol.errors import ConfigError, reason

_UNUSED = ("pooler.",)
"""Weights that hidden states do not depend on; checkpoints may lack them."""


@dataclass(frozen=True, slots=True)
class Text:
    """One text for an encoder, or a pair. second_from: first token of the second text; 0: no pair."""

    token_ids: Sequence[int]
    second_from: int = 0


class EncoderModel(Computing):
    """Encoder. Not thread-safe; the engine thread calls it under `torch.inference_mode()`.

    classifies: it has a head and returns only logits."""

    def __init__(self, module: Any, info: ModelInfo, device: torch.device, ops: Ops, *, classifies: bool) -> None:
        self.info = info
        self.device = device
        self.dtype: torch.dtype = module.dtype
        self.ops = ops
        self.classifies = classifies
        self._module = module
        self._padding = int(getattr(module.config, "pad_token_id", None) or 0)
        types = int(getattr(module.config, "type_vocab_size", None) or 0)
        self._typed = types > 1 and "token_type_ids" in inspect.signature(module.forward).parameters

    def hidden(self, texts: Sequence[Text]) -> torch.Tensor:
        """Return last hidden states [text, longest, hidden] of a padded batch; rows after a text are undefined."""
        found: torch.Tensor = self._base()(**self._inputs(texts)).last_hidden_state
        return found

    def logits(self, texts: Sequence[Text]) -> torch.Tensor:
        """Return float32 logits [text, label]."""
        found: torch.Tensor = self._module(**self._inputs(texts)).logits.float()
        return found

    def _base(self) -> Any:
        return self._module.base_model if self.classifies else self._module

    def _inputs(self, texts: Sequence[Text]) -> dict[str, torch.Tensor]:
        lengths = torch.tensor([len(text.token_ids) for text in texts])
        longest = int(lengths.max())
        ids = torch.full((len(texts), longest), self._padding)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text.token_ids)] = torch.tensor(text.token_ids)
        places = torch.arange(longest)
        inputs = {"input_ids": ids, "attention_mask": (places < lengths[:, None]).long()}
        seconds = torch.tensor([text.second_from or longest for text in texts])
        if self._typed and int(seconds.min()) < longest:
            inputs["token_type_ids"] = ((places >= seconds[:, None]) & (places < lengths[:, None])).long()
        return {name: tensor.to(self.device) for name, tensor in inputs.items()}


def load_encoder(
    source: ModelSource,
    *,
    classifies: bool,
    device: torch.device,
    dtype: torch.dtype,
    ops: Ops,
    progress: Callable[[float], None] | None = None,
) -> EncoderModel:
    """Load through AutoModel, or with its classification head.

    Raises ConfigError with transformers' reason, or naming the missing part."""
    facts = read_facts(source)
    if not facts.max_model_len:
        raise ConfigError(f"{source.path} does not give the model's longest text", param="model")
    module = _load_module(source, dtype, classifies)
    try:
        module = module.to(device).eval()
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"the model's weights do not fit the memory of {device}", param="model") from error
    if progress is not None:
        progress(1.0)
    info = ModelInfo(source.name, source.revision, 1, 1, 1, facts.vocab_size, facts.max_model_len)
    return EncoderModel(module, info, device, ops, classifies=classifies)


def _load_module(source: ModelSource, dtype: torch.dtype, classifies: bool) -> Any:
    """Load the module with every weight from the checkpoint; transformers would fill missing ones with noise."""
    transformers = transformers_module()
    kind = transformers.AutoModelForSequenceClassification if classifies else transformers.AutoModel
    try:
        module, loaded = kind.from_pretrained(source.path, dtype=dtype, local_files_only=True, output_loading_info=True)
    except Exception as error:
        raise ConfigError(f"transformers cannot load {source.name}: {reason(error)}", param="model") from error
    missing = sorted(name for name in loaded["missing_keys"] if classifies or not name.startswith(_UNUSED))
    if missing:
        raise ConfigError(f"the model's files lack the tensor {missing[0]}", param="model")
    return module
