"""Sizes, special tokens and decoding rules of a Whisper checkpoint, from its config files."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.model_files.config_fields import check_layers, whole
from kvferry.model_files.read_errors import naming
from kvferry.model_files.source import ModelSource, read_json, resolve
from kvferry.model_files.tokenizer import TextTokenizer
from kvferry.protocol.errors import ConfigError, reason

SPEECH = "whisper"
"""Value of model_type of models that transcribe speech."""
_MULTILINGUAL = 51_865
"""Smallest vocabulary of a model of several languages."""
MAX_INITIAL_TIMESTAMP = 50
"""Latest start of a window's first segment, in steps of 0.02 s, unless the checkpoint says otherwise."""


@dataclass(frozen=True, slots=True)
class SpeechTokens:
    """Ids of Whisper's special tokens.

    languages: by code, such as `en`; empty for a model of English alone. timestamps: id of `<|0.00|>`; all larger ids
    are later times in steps of 0.02 s. no_speech: -1 if the vocabulary has none."""

    start: int
    end: int
    previous: int
    transcribe: int
    translate: int
    no_timestamps: int
    no_speech: int
    languages: tuple[tuple[str, int], ...]

    @property
    def timestamps(self) -> int:
        """Return the id of the first timestamp."""
        return self.no_timestamps + 1


@dataclass(frozen=True, slots=True)
class SpeechConfig:
    """Whisper's sizes and rules.

    positions: outputs of the encoder for a window, each 0.02 s. context: longest sequence of the decoder in tokens.
    suppressed, suppressed_first: tokens that are never drawn, and not drawn first. alignment_heads: (layer, head) of
    the decoder whose attention follows the audio."""

    name: str
    mels: int
    width: int
    positions: int
    context: int
    vocab_size: int
    encoder_layers: int
    encoder_heads: int
    encoder_mlp: int
    decoder_layers: int
    decoder_heads: int
    decoder_mlp: int
    embedding_scale: float
    tokens: SpeechTokens
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]
    max_initial_timestamp: int
    alignment_heads: tuple[tuple[int, int], ...]

    @property
    def frames(self) -> int:
        """Return the frames of a window, each 0.01 s."""
        return 2 * self.positions


def is_speech(source: ModelSource) -> bool:
    """Return whether the model transcribes speech. Raises ConfigError if its config cannot be read."""
    return source.kind == "hf" and read_json(source.path / "config.json").get("model_type") == SPEECH


def transcribes(model: str) -> bool:
    """Return whether a model, given as in --model, transcribes speech. Raises ConfigError if it cannot be found."""
    return is_speech(resolve(model, weights=False))


def require_decoder() -> None:
    """Raise ConfigError unless the package that decodes audio files is installed. Imports nothing."""
    if importlib.util.find_spec("av") is None:
        raise ConfigError("a model that takes audio needs PyAV; run: pip install 'kvferry[worker,speech]'")


def read_speech_config(source: ModelSource) -> SpeechConfig:
    """Return the model's sizes, tokens and rules. Raises ConfigError naming the field."""
    with naming(source.name):
        config = read_json(source.path / "config.json")
        path = source.path / "generation_config.json"
        rules = read_json(path) if path.is_file() else {}
        try:
            return _speech_config(source, config, rules, TextTokenizer.from_directory(source.path))
        except KeyError as error:
            raise ConfigError(f"{source.path}/config.json has no {error.args[0]}", param="model") from error
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the config of {source.name} is invalid: {reason(error)}", param="model") from error


def _speech_config(
    source: ModelSource, config: dict[str, Any], rules: dict[str, Any], tokenizer: TextTokenizer
) -> SpeechConfig:
    for side in ("encoder", "decoder"):
        check_layers(config.get(f"{side}_layers"))
    if (activation := config.get("activation_function", "gelu")) != "gelu":
        raise ConfigError(f"config.json: activation_function must be gelu, got {activation!r:.80}", param="model")
    layers, heads, width = (whole(config, name) for name in ("decoder_layers", "decoder_attention_heads", "d_model"))
    encoder_heads, vocab_size = whole(config, "encoder_attention_heads"), whole(config, "vocab_size")
    if width % heads or width % encoder_heads:
        raise ConfigError(f"config.json: d_model {width} is not a multiple of the number of heads", param="model")
    tokens = _tokens(source.path, tokenizer, rules, bool(rules.get("is_multilingual", vocab_size >= _MULTILINGUAL)))
    if max(tokens.timestamps, *(id for _, id in tokens.languages), 0) >= vocab_size:
        raise ConfigError(f"config.json: vocab_size {vocab_size} lacks tokens of the tokenizer", param="model")
    aligned = tuple((int(layer), int(head)) for layer, head in rules.get("alignment_heads") or ())
    if not all(0 <= layer < layers and 0 <= head < heads for layer, head in aligned):
        raise ConfigError("generation_config.json: alignment_heads names a head that the model lacks", param="model")
    default_heads = tuple((layer, head) for layer in range(layers // 2, layers) for head in range(heads))
    initial = rules.get("max_initial_timestamp_index")
    return SpeechConfig(
        name=source.name,
        mels=whole(config, "num_mel_bins"),
        width=width,
        positions=whole(config, "max_source_positions"),
        context=whole(config, "max_target_positions"),
        vocab_size=vocab_size,
        encoder_layers=whole(config, "encoder_layers"),
        encoder_heads=encoder_heads,
        encoder_mlp=whole(config, "encoder_ffn_dim"),
        decoder_layers=layers,
        decoder_heads=heads,
        decoder_mlp=whole(config, "decoder_ffn_dim"),
        embedding_scale=width**0.5 if config.get("scale_embedding") else 1.0,
        tokens=tokens,
        suppressed=_ids(rules, config, "suppress_tokens", vocab_size),
        suppressed_first=_ids(rules, config, "begin_suppress_tokens", vocab_size),
        max_initial_timestamp=MAX_INITIAL_TIMESTAMP if initial is None else int(initial),
        alignment_heads=aligned or default_heads,
    )


def _ids(rules: dict[str, Any], config: dict[str, Any], name: str, vocab_size: int) -> tuple[int, ...]:
    """Return a list of token ids of generation_config.json, or else of config.json."""
    found = rules[name] if rules.get(name) is not None else config.get(name) or ()
    return tuple(int(id) for id in found if 0 <= int(id) < vocab_size)


def _tokens(path: Path, tokenizer: TextTokenizer, rules: dict[str, Any], multilingual: bool) -> SpeechTokens:
    find = tokenizer.library.token_to_id

    def known(*texts: str) -> int:
        for text in texts:
            if (id := find(text)) is not None:
                return int(id)
        raise ConfigError(f"{path}/tokenizer.json has no token {texts[0]}", param="model")

    start, transcribe = known("<|startoftranscript|>"), known("<|transcribe|>")
    no_timestamps = known("<|notimestamps|>")
    spoken = find("<|nospeech|>") or find("<|nocaptions|>")
    languages = {name.strip("<|>"): int(id) for name, id in (rules.get("lang_to_id") or {}).items()}
    if not languages:  # they stand between start and task
        between = (
            (id, tokenizer.library.id_to_token(id) or "") for id in range(start + 1, min(transcribe, start + 120))
        )
        languages = {text[2:-2]: id for id, text in between if text.startswith("<|") and len(text) in (6, 7)}
    return SpeechTokens(
        start=start,
        end=known("<|endoftext|>"),
        previous=known("<|startofprev|>"),
        transcribe=transcribe,
        translate=known("<|translate|>"),
        no_timestamps=no_timestamps,
        no_speech=-1 if spoken is None else int(spoken),
        languages=tuple(languages.items()) if multilingual else (),
    )
