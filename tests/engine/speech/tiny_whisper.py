"""A tiny Whisper of random weights, as a checkpoint of transformers: windows of a second, two languages."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

POSITIONS, CONTEXT = 50, 64
"""Outputs of the encoder for a window, which is a second long, and longest sequence of the decoder."""


def make_tiny_whisper(out: Path, seed: int = 0, scale: float = 0.3, encoder_heads: int = 4) -> Path:
    """Write the checkpoint and return its folder. scale: standard deviation of the weights.

    Embeddings are small: as the vocabulary projection, too, they would make each token follow itself."""
    tokenizer = _tokenizer()
    ids = tokenizer.get_vocab(with_added_tokens=True)
    torch.manual_seed(seed)
    config = WhisperConfig(
        vocab_size=len(ids), num_mel_bins=80, d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=encoder_heads, decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96,
        max_source_positions=POSITIONS, max_target_positions=CONTEXT, init_std=scale,
        decoder_start_token_id=ids["<|startoftranscript|>"], bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|endoftext|>"], pad_token_id=ids["<|endoftext|>"], suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        if "bias" in name or "embed" in name:
            torch.nn.init.normal_(weight, std=scale / 5 if "tokens" in name else scale)
    special = ["<|startoftranscript|>", "<|translate|>", "<|transcribe|>", "<|startofprev|>", "<|nospeech|>"]
    model.generation_config = GenerationConfig(
        suppress_tokens=[5, 7, *(ids[name] for name in special)], begin_suppress_tokens=[9, ids["<|endoftext|>"]],
        lang_to_id={"<|en|>": ids["<|en|>"], "<|de|>": ids["<|de|>"]}, is_multilingual=True,
        task_to_id={"translate": ids["<|translate|>"], "transcribe": ids["<|transcribe|>"]},
        no_timestamps_token_id=ids["<|notimestamps|>"], max_initial_timestamp_index=50, max_length=CONTEXT // 2 + 3,
        prev_sot_token_id=ids["<|startofprev|>"], decoder_start_token_id=ids["<|startoftranscript|>"],
        bos_token_id=ids["<|endoftext|>"], eos_token_id=ids["<|endoftext|>"], pad_token_id=ids["<|endoftext|>"],
        alignment_heads=[[0, 1], [1, 2]],
    )  # fmt: skip
    model.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    return out


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    named = ("endoftext", "startoftranscript", "en", "de", "translate", "transcribe", "startofprev", "nospeech")
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in (*named, "notimestamps")])
    tokenizer.add_tokens([AddedToken(f"<|{step * 0.02:.2f}|>") for step in range(POSITIONS + 1)])
    return tokenizer


def edit(path: Path, **fields: object) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
