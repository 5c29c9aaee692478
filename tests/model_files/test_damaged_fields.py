"""Fields of model files that are of another type or size than they should: each reader refuses them for itself.

Workers read the same files as routers, without a router that would have refused them first."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.model_files.gguf import Strings
from kvferry.model_files.memory_needs import config_needs, model_needs
from kvferry.model_files.pooling_config import read_task
from kvferry.model_files.read_errors import MAX_REFUSAL, naming
from kvferry.model_files.safetensors_headers import safetensors_header
from kvferry.model_files.source import MAX_CONTEXT, MAX_VOCAB, ModelSource, read_facts, resolve
from kvferry.model_files.tokenizer import load_tokenizer
from kvferry.model_files.unsupported_models import require_runnable
from kvferry.model_files.weight_digest import file_digest
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import RouterSettings
from kvferry.router.text.loader import load_text_model
from tests.file_mutants import metadata, write_directory, write_gguf


def directory(path: Path, **config: Any) -> ModelSource:
    """A model whose config has these fields in place of its own."""
    found = write_directory(path / "odd")
    known = json.loads((found / "config.json").read_text())
    (found / "config.json").write_text(json.dumps(known | config))
    return resolve(str(found))


def gguf(path: Path, **fields: Any) -> ModelSource:
    """A file with these fields of `tokenizer.` in place of its own."""
    return resolve(str(write_gguf(path / "odd.gguf", metadata() | {f"tokenizer.{key}": fields[key] for key in fields})))


@pytest.mark.parametrize(
    ("read", "config"),
    [
        (read_task, {"hidden_size": [1]}),
        (read_task, {"hidden_size": float("nan")}),
        (read_task, {"model_type": {"a": 1}}),
        (require_runnable, {"architectures": 64}),
        (model_needs, {"head_dim": "x", "num_attention_heads": 2**31}),
        (model_needs, {"head_dim": [0], "num_attention_heads": 2**31}),
        (read_facts, {"num_hidden_layers": 10**30}),
        (read_facts, {"max_position_embeddings": MAX_CONTEXT + 1, "rope_scaling": None}),
    ],
)
def test_a_directorys_odd_field_is_refused_by_the_models_name(
    tmp_path: Path, read: Callable[[ModelSource], object], config: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="odd") as caught:
        read(directory(tmp_path, **config))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["intermediate_size", "moe_intermediate_size", "n_shared_experts", "head_dim"])
def test_needs_of_a_config_alone_are_computed_of_numbers(name: str) -> None:
    """A text times a number is a text, of GiB."""
    config = {"hidden_size": 2**31, "num_hidden_layers": 2, "num_attention_heads": 2**31, "vocab_size": 9}
    assert config_needs(config | {"num_experts": 2}).layers == 2
    with pytest.raises(ConfigError, match=f"{name} must be a whole number of at least 1, got 'x'"):
        config_needs(config | {"num_experts": 2, name: "x"})


def test_a_tensors_shape_is_made_of_numbers(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": ["x", 2**31], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "odd.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(ConfigError, match=r"cannot read the header of .*odd\.safetensors"):
        safetensors_header(tmp_path / "odd.safetensors")


def test_the_longest_context_is_served(tmp_path: Path) -> None:
    found = directory(tmp_path, max_position_embeddings=MAX_CONTEXT, rope_scaling=None)
    assert read_facts(found).max_model_len == MAX_CONTEXT


def test_a_panic_of_the_tokenizers_library_is_a_refusal(tmp_path: Path) -> None:
    """With such a prefix it takes a slice of a merge that is shorter, and panics; Python sees no Exception."""
    found = directory(tmp_path)
    file = found.path / "tokenizer.json"
    tokens = json.loads(file.read_text())
    tokens["model"]["continuing_subword_prefix"] = "</s>"
    file.write_text(json.dumps(tokens))
    with pytest.raises(ConfigError, match=r"cannot read the tokenizer of .*/odd/tokenizer\.json: PanicException"):
        load_tokenizer(found)


def test_a_token_id_beyond_all_vocabularies_is_refused(tmp_path: Path) -> None:
    """The grammar library takes memory and time for all the ids below it."""
    found = directory(tmp_path)
    file = found.path / "tokenizer.json"
    tokens = json.loads(file.read_text())
    tokens["model"]["vocab"]["o"] = 2**31
    file.write_text(json.dumps(tokens))
    with pytest.raises(ConfigError, match=f"a token of id 2147483648; the limit is {MAX_VOCAB - 1}"):
        load_tokenizer(found)


def test_a_workers_tokenizer_is_refused_as_a_routers_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the tokenizer of .*odd\.gguf: IndexError"):
        load_tokenizer(gguf(tmp_path, **{"ggml.bos_token_id": 2**31, "ggml.add_bos_token": 1}))


def test_a_chat_template_that_is_no_text_is_refused_in_plain_words(tmp_path: Path) -> None:
    found = gguf(tmp_path, chat_template=["a", "b"])
    with pytest.raises(
        ConfigError, match="odd: a chat template of the GGUF file must be text, not an array of 2 texts"
    ):
        load_text_model(RouterSettings(model=(str(found.path),)))


def test_an_error_about_a_vocabulary_does_not_quote_it() -> None:
    assert repr(Strings(bytes(8) * 3, 3)) == "an array of 3 texts"


@pytest.mark.parametrize("named", ["odd: ", ""])
def test_a_refusal_is_short_however_long_the_field_that_it_quotes(named: str) -> None:
    with pytest.raises(ConfigError, match=r"^odd: x") as caught, naming("odd"):
        raise ConfigError(named + "x" * 10**6, param="model")
    assert len(caught.value.message) == MAX_REFUSAL
    assert caught.value.message.endswith("…")
    assert caught.value.param == "model"


def test_a_small_file_is_digested_in_little_memory(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"weights" * 100)
    file_digest(tmp_path / "small")  # imports the library
    tracemalloc.start()
    try:
        file_digest(tmp_path / "small")
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()
