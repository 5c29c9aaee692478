"""Small random models of any family as users have them: a directory with weights, tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvferry.engine.models.hf import transformers_module
from tests.cluster.oracle import Answer, answer_of

VOCAB = 512
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tokenizer() -> Tokenizer:
    """Byte-level BPE, trained on English prose."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(mark, special=True) for mark in MARKS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([topics[name] for name in sorted(topics)], trainer)
    return made


def save_checkpoint(path: Path, family: str, *, shard_size: str = "1GB", **settings: Any) -> Path:
    """A model of transformers' config class `family`, with weights that depend on nothing but its shape."""
    transformers = transformers_module()
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, family)(**(SHAPE | settings)))
    model.save_pretrained(path, max_shard_size=shard_size)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(), eos_token=MARKS[2], bos_token=MARKS[0], chat_template=TEMPLATE
    )
    fast.save_pretrained(path)
    return path


def float32_model(path: Path, **source: Any) -> torch.nn.Module:
    """transformers' own model."""
    model: torch.nn.Module = transformers_module().AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", **source
    )
    return model.eval()


def greedy(path: Path, prompts: list[list[int]], **source: Any) -> list[Answer]:
    """transformers' own greedy continuations, in float32."""
    model = float32_model(path, **source)
    return [answer_of(model, tuple(prompt)) for prompt in prompts]
