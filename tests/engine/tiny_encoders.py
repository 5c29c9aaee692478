"""Tiny random encoders as users have them, with or without a head, and transformers' own answers of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvferry.engine.models.hf import transformers_module

VOCAB = 120
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "initializer_range": 0.3,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "BertConfig": {},
    "ModernBertConfig": {"local_attention": 8, "global_attn_every_n_layers": 2, "pad_token_id": 1},
    "XLMRobertaConfig": {"type_vocab_size": 1, "pad_token_id": 1},
    "RobertaConfig": {"type_vocab_size": 1, "pad_token_id": 1},
    "DistilBertConfig": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "ElectraConfig": {"embedding_size": 16},
}


def save_encoder(path: Path, family: str, *, kind: str = "AutoModel", **settings: Any) -> Path:
    """Random weights under `path`; kind: AutoModel, or AutoModelForSequenceClassification for one with a head."""
    transformers = transformers_module()
    torch.manual_seed(11)
    config = getattr(transformers, family)(**(SHAPE | FAMILIES[family] | settings))
    model = getattr(transformers, kind).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(0.7, 0.2)
    model.save_pretrained(path)
    return path


@torch.inference_mode()
def oracle_hidden(path: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """float32 [T, hidden], of one text alone."""
    model = transformers_module().AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    return torch.as_tensor(model(input_ids=torch.tensor([list(token_ids)])).last_hidden_state[0])


@torch.inference_mode()
def oracle_logits(path: Path, token_ids: Sequence[int], second_from: int = 0) -> torch.Tensor:
    """float32 [labels], of one text or pair alone."""
    auto = transformers_module().AutoModelForSequenceClassification
    model = auto.from_pretrained(path, dtype=torch.float32).eval()
    extra = {}
    if second_from:
        extra["token_type_ids"] = torch.tensor([[int(at >= second_from) for at in range(len(token_ids))]])
    return torch.as_tensor(model(input_ids=torch.tensor([list(token_ids)]), **extra).logits[0])
