from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvferry.protocol.errors import ConfigError
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.settings import RouterSettings
from kvferry.router.api.bodies.completions import CompletionBody
from kvferry.router.api.served_models import ServedModel
from kvferry.router.request_context import RequestContext
from kvferry.router.text.encoding import Encoder
from kvferry.router.text.loader import load_text_model
from kvferry.router.text.renderer import Renderer
from kvferry.router.text.text_model import TextModel
from tests.api_parts import MESSAGES, FakeCluster, says


def directory(path: Path, **tokenizer_config: Any) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 300,
        "max_position_embeddings": 128,
        "eos_token_id": 7,
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    alphabet = {char: place for place, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def load(path: Path) -> TextModel:
    return load_text_model(RouterSettings(model=(str(path),)))


def rendered(path: Path, **options: Any) -> str:
    return load(path).render(MESSAGES, **options)


def test_a_directory_gives_tokenizer_template_and_facts(tmp_path: Path) -> None:
    path = directory(
        tmp_path,
        bos_token={"content": "<s>", "lstrip": False},
        eos_token="</s>",
        chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    )
    text = load(path)
    assert rendered(path) == "<s>Hello</s>"
    assert text.name == tmp_path.name
    assert (text.facts.eos_token_ids, text.facts.max_model_len, text.facts.vocab_size) == ((7,), 128, 300)
    assert text.tokenizer.decode(text.encode("é1")) == "é1"


def test_special_tokens_may_stand_in_their_own_file(tmp_path: Path) -> None:
    path = directory(tmp_path, chat_template="{{ bos_token }}")
    (path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<b>"}}')
    assert rendered(path) == "<b>"


def test_named_templates(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with {{ tools | tojson }} <tool_call>"},
    ]
    path = directory(tmp_path, chat_template=named)
    assert rendered(path) == "plain"
    assert rendered(path, tools=[{}]) == "with [{}] <tool_call>"


def test_a_template_file_comes_before_the_configuration(tmp_path: Path) -> None:
    path = directory(tmp_path, chat_template="old")
    (path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert rendered(path) == "json"
    (path / "chat_template.jinja").write_text("jinja")
    assert rendered(path) == "jinja"


def test_a_model_may_have_no_template(tmp_path: Path) -> None:
    assert load(directory(tmp_path)).template is None


def test_a_template_setting_in_json(tmp_path: Path) -> None:
    path, file = directory(tmp_path), tmp_path / "own.json"
    file.write_text('{"chat_template": "own"}')
    text = load_text_model(RouterSettings(model=(str(path),), chat_template=str(file)))
    assert text.render(MESSAGES) == "own"
    file.write_text("{}")
    with pytest.raises(ConfigError, match="no chat_template"):
        load_text_model(RouterSettings(model=(str(path),), chat_template=str(file)))


def test_the_model_s_own_sampling_defaults_stand_in_for_what_a_request_leaves_out(tmp_path: Path) -> None:
    path = directory(tmp_path)
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "max_new_tokens": 5}
    (path / "generation_config.json").write_text(json.dumps(defaults))

    def params(settings: RouterSettings, **body: Any) -> SamplingParams:
        asked = CompletionBody(model="m", prompt="p", max_tokens=9, **body)  # type: ignore[arg-type]
        pool = ServedModel(
            text := load_text_model(settings),
            FakeCluster(says("x")),
            RouterMetrics().of(text.name),
            Encoder(text),
            Renderer(text.template),
        )
        (spec,) = asyncio.run(pool.specs(RequestContext("c", arrival=0.0, deadline=9.0), asked))
        return spec.params

    own = params(RouterSettings(model=(str(path),)), top_p=0.5)
    assert (own.temperature, own.top_k, own.top_p, own.max_tokens) == (0.6, 20, 0.5, 9)
    plain = params(RouterSettings(model=(str(path),), generation_config="none"))
    assert (plain.temperature, plain.top_k, plain.top_p) == (1.0, 0, 1.0)
