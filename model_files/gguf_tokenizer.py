"""Tokenizers from GGUF metadata: byte-level BPE ("gpt2") and SentencePiece BPE ("llama", and with merges "gemma4")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kvferry.model_files.gguf_pre_tokenizers import BOS_BY_DEFAULT, COMPOSED, WHOLE_WORDS_FIRST, pre_tokenizer
from kvferry.protocol.errors import ConfigError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that the `tokenizer.ggml.*` keys describe.

    Raises ConfigError for unknown kinds: a near miss would silently give wrong tokens."""
    kind = metadata.get("tokenizer.ggml.model")
    if not metadata.get("tokenizer.ggml.tokens"):
        raise ConfigError("the GGUF file has no tokenizer", param="model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata)
    elif kind in ("llama", "gemma4"):
        tokenizer = _sentencepiece(metadata)
    else:
        raise ConfigError(
            f"tokenizer.ggml.model {kind!r:.80} of the GGUF file is not supported (gpt2, llama, gemma4)", param="model"
        )
    _add_tokens(tokenizer, metadata)
    _frame(tokenizer, metadata)
    return tokenizer


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    merges = [_pair(merge) for merge in metadata.get("tokenizer.ggml.merges", ())]
    bpe = models.BPE(vocab=_vocab(metadata), merges=merges, ignore_merges=pre in WHOLE_WORDS_FIRST)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return a SentencePiece BPE: it joins the neighbours with the highest score, so its merges are sorted by score.

    Gemma 4's come in order. Its runs of line breaks are apart from all else."""
    vocab, tokens = _vocab(metadata), metadata["tokenizer.ggml.tokens"]
    ordered = metadata["tokenizer.ggml.model"] == "gemma4"
    if ordered:
        merges = [_pair(merge) for merge in metadata.get("tokenizer.ggml.merges", ())]
    else:
        merges = _merges_by_score(vocab, tokens, _types(metadata), metadata.get("tokenizer.ggml.scores", ()))
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    undo: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if ordered:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated")
    if metadata.get("tokenizer.ggml.add_space_prefix", not ordered):
        steps.insert(0, normalizers.Prepend("▁"))
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer


def _merges_by_score(
    vocab: Mapping[str, int], tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    if len(scores) != len(tokens):
        raise ConfigError("the GGUF file's tokenizer.ggml.scores do not match its tokens", param="model")
    ranked = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind not in (NORMAL, USER_DEFINED):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-score, vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for _, _, _, left, right in ranked]


def _vocab(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _types(metadata: Mapping[str, Any]) -> list[int]:
    tokens = metadata["tokenizer.ggml.tokens"]
    types = list(metadata.get("tokenizer.ggml.token_type", ()))
    return types if len(types) == len(tokens) else [NORMAL] * len(tokens)


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Add the file's tokens: control tokens are special; user-defined tokens match in text, too, but stay visible."""
    special, visible = [], []
    for token, kind in zip(metadata["tokenizer.ggml.tokens"], _types(metadata), strict=True):
        if kind in (CONTROL, UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == USER_DEFINED:
            visible.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(visible)


def _frame(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Add begin and end tokens around a text that is encoded with special tokens; the defaults are llama.cpp's."""
    kind, pre = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre")
    parts, used = ["$A"], []
    default_bos = kind in ("llama", "gemma4") or pre in BOS_BY_DEFAULT
    for name, default, place in (("bos", default_bos, 0), ("eos", False, 2)):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is None or not metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            continue
        token = metadata["tokenizer.ggml.tokens"][token_id]
        parts.insert(place, token)
        used.append((token, token_id))
    if used:
        tokenizer.post_processor = processors.TemplateProcessing(single=parts, special_tokens=used)
