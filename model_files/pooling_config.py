"""Task of a model (generate, embed, classify or transcribe) and its pooling, from its files.

Encoders such as BERT see the whole text at once and generate nothing. `modules.json` beside a model and the folders it
names, in the layout of sentence-transformers, say how hidden states become one vector."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvferry.model_files.gguf import read_gguf
from kvferry.model_files.multimodal import text_config
from kvferry.model_files.read_errors import naming
from kvferry.model_files.source import ModelSource, read_json, read_list
from kvferry.model_files.speech_config import SPEECH
from kvferry.model_files.supported_encoders import is_encoder
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.work import POOLINGS

_CLASSIFIER = "ForSequenceClassification"
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_POOLING_WORDS = {"lasttoken": "last"}
_GGUF_POOLINGS = {1: "mean", 2: "cls", 3: "last"}
_SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """Task of a model and how it pools.

    kind        "classify": a head over labels, and no vectors; "transcribe": it writes down speech
    pooling     how hidden states become a vector (protocol.work.POOLINGS)
    normalize   vectors have length 1
    width       length of a vector, in numbers
    dense       folders of dense modules after the pooling, in order
    labels      a classifier's labels by the index of its logits; with one label it scores pairs of texts
    activation  a classifier's function of its logits: softmax, sigmoid or none
    typed       token types tell the second text of a pair from the first
    """

    kind: Literal["generate", "embed", "classify", "transcribe"] = "generate"
    encoder: bool = False
    pooling: str = "last"
    normalize: bool = True
    width: int = 0
    dense: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    activation: str = ""
    typed: bool = False

    @property
    def scores_pairs(self) -> bool:
        """Return whether it is a cross-encoder."""
        return len(self.labels) == 1

    @property
    def description(self) -> str:
        """Return a description of the kind of model, for errors."""
        if self.kind == "generate":
            return "it is a decoder, which generates and embeds"
        if self.kind == "transcribe":
            return "it transcribes speech; use /v1/audio/transcriptions"
        if self.kind == "embed":
            return "it is an encoder, which embeds"
        return f"it is an encoder with a head of {len(self.labels)} label{'s' * (len(self.labels) > 1)}"


GENERATES = PoolingConfig()


def read_task(source: ModelSource, pooling: str = "auto") -> PoolingConfig:
    """Return the task of a model. `pooling`: one of POOLINGS, overrides the files. Raises ConfigError."""
    with naming(source.name):
        return _task(source, pooling)


def _task(source: ModelSource, pooling: str) -> PoolingConfig:
    if source.kind == "gguf":
        file = read_gguf(source.path)
        found = _GGUF_POOLINGS.get(int(file.get("pooling_type", 3)), "last")
        return PoolingConfig(
            pooling=found if pooling == "auto" else pooling, width=int(file.get("embedding_length", 0))
        )
    config = read_json(source.path / "config.json")
    if config.get("model_type") == SPEECH:
        return PoolingConfig("transcribe")
    if is_encoder(config) and _architecture(config).endswith(_CLASSIFIER):
        return _classifier(config)
    return _embedder(source.path, config, pooling)


def _architecture(config: dict[str, Any]) -> str:
    return str(next(iter(config.get("architectures") or ()), ""))


def _classifier(config: dict[str, Any]) -> PoolingConfig:
    names = config.get("id2label") or {}
    count = len(names) or int(config.get("num_labels") or 2)
    labels = tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(count))
    one_each = count == 1 or config.get("problem_type") == "multi_label_classification"
    own = config.get("sentence_transformers") or {}
    function = str(own.get("activation_fn") or config.get("sbert_ce_default_activation_function") or "")
    activation = "none" if function.endswith("Identity") else _SIGMOID if one_each else "softmax"
    typed = int(config.get("type_vocab_size") or 0) > 1
    return PoolingConfig("classify", encoder=True, labels=labels, activation=activation, typed=typed)


def _embedder(path: Path, config: dict[str, Any], pooling: str) -> PoolingConfig:
    encoder = is_encoder(config)
    modules = _modules(path)
    found, normalize = "mean" if encoder else "last", not modules
    dense: list[str] = []
    width = int(text_config(config).get("hidden_size") or text_config(config).get("n_embd") or 0)
    for kind, folder in modules:
        if kind == "Pooling":
            found = _pooling(read_json(path / folder / "config.json"), path / folder)
        elif kind == "Normalize":
            normalize = True
        elif kind == "Dense":
            dense.append(folder)
            width = int(read_json(path / folder / "config.json").get("out_features") or width)
        elif kind != "Transformer":
            raise ConfigError(f"{path}/modules.json names a module {kind!r:.80}, which is not supported", param="model")
    chosen = found if pooling == "auto" else pooling
    if chosen not in POOLINGS:
        raise ConfigError(
            f"the pooling {chosen!r:.80} of {path} is not supported; choose another with --pooling", param="pooling"
        )
    return PoolingConfig("embed" if encoder else "generate", encoder, chosen, normalize, width, tuple(dense))


def _modules(path: Path) -> list[tuple[str, str]]:
    """Return (kind, folder) of each module; empty without a modules.json."""
    file = path / "modules.json"
    if not file.is_file():
        return []
    listed = read_list(file)
    return [(str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))) for module in listed]


def _pooling(config: dict[str, Any], path: Path) -> str:
    """Return the pooling of a Pooling module's config, which has one word or one flag per kind."""
    word = config.get("pooling_mode")
    if isinstance(word, str):
        return _POOLING_WORDS.get(word, word)
    chosen = [name for flag, name in _POOLING_FLAGS.items() if config.get(flag)]
    if len(chosen) != 1:
        raise ConfigError(f"{path} asks for {len(chosen)} poolings; only one is supported", param="model")
    return chosen[0]
