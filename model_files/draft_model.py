"""Resolution of the draft model for speculative decoding."""

from __future__ import annotations

import re

from kvferry.model_files.source import ModelSource, read_facts, read_json, resolve
from kvferry.model_files.supported_encoders import is_encoder
from kvferry.model_files.tekken import TEKKEN
from kvferry.model_files.tokenizer import load_tokenizer
from kvferry.model_files.unsupported_models import require_runnable, resolve_runnable
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import WorkerSettings

FLAG = "speculative_model"
_PADDING = re.compile(r"\[PAD\d+\]")


def resolve_draft(settings: WorkerSettings, target: ModelSource, *, weights: bool = True) -> ModelSource | None:
    """Return the model of --speculative-model; None without that flag.

    weights=False: downloads and hashes no weights. Raises ConfigError if the model cannot run, or if its vocabulary is
    not that of `target`."""
    if not settings.speculative_model:
        return None
    if not settings.num_speculative_tokens:
        raise ConfigError("--speculative-model needs --num-speculative-tokens of at least 1", param=FLAG)
    try:
        name = settings.speculative_model
        draft = resolve_runnable(name, settings.load_format) if weights else resolve(name, weights=False)
        require_runnable(draft)
        for source in (target, draft):
            if source.kind == "hf" and is_encoder(read_json(source.path / "config.json")):
                raise ConfigError(f"{source.name} is an encoder, which speculative decoding does not support")
        _require_same_vocabulary(draft, target)
    except ConfigError as error:
        raise ConfigError(f"--speculative-model: {error.message}", param=FLAG) from error
    return draft


def _require_same_vocabulary(draft: ModelSource, target: ModelSource) -> None:
    """Raise ConfigError unless both models have the same tokens under the same ids.

    If one's files hold no tokenizer, the sizes of the vocabularies are compared."""
    own, other = _spelled(draft), _spelled(target)
    same, sizes = own == other, (len(own), len(other))
    if not own or not other:
        sizes = read_facts(draft).vocab_size, read_facts(target).vocab_size
        same = sizes[0] == sizes[1]
    if not same:
        raise ConfigError(
            f"{draft.name} has a vocabulary of {sizes[0]} tokens, {target.name} has another of {sizes[1]}; a draft "
            "model needs the vocabulary of its target"
        )


def _spelled(source: ModelSource) -> dict[str, int]:
    """Return ids by the spelling of their tokens, without padding tokens; empty if the files hold no tokenizer."""
    if source.kind == "hf" and not any((source.path / name).is_file() for name in ("tokenizer.json", TEKKEN)):
        return {}
    vocabulary = load_tokenizer(source).library.get_vocab(with_added_tokens=True)
    return {token: index for token, index in vocabulary.items() if not _PADDING.fullmatch(token)}
