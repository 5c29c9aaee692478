"""A GGUF of gpt-oss is all that its text side needs: markers, template, and what ends an output."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from kvferry.model_files.gguf_tokenizer import CONTROL, NORMAL, USER_DEFINED
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import RouterSettings
from kvferry.router.text.loader import load_text_model
from kvferry.router.text.parsers.families import REASONING
from kvferry.router.text.parsers.harmony import CHANNEL, MARKERS, MESSAGE, START, lead
from kvferry.router.text.text_model import TextModel
from tests.gguf_files import finish
from tests.harmony_model import TEMPLATE


def loaded(path: Path, markers: tuple[str, ...] = MARKERS, kind: int = CONTROL, **settings: str) -> TextModel:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "12", *markers, "<|endoftext|>"]
    writer = gguf.GGUFWriter(str(path), "gpt-oss")
    writer.add_context_length(512)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-4o")
    writer.add_token_list(tokens)
    writer.add_token_types([NORMAL] * (len(alphabet) + 1) + [kind] * (len(markers) + 1))
    writer.add_token_merges(["1 2"])
    writer.add_eos_token_id(tokens.index("<|return|>"))
    writer.add_chat_template(TEMPLATE.removeprefix("\n"))
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 4), dtype=np.float32))
    finish(writer)
    return load_text_model(RouterSettings(model=[str(path)], **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
def test_the_file_tells_all_that_is_needed(kind: int, tmp_path: Path) -> None:
    text = loaded(tmp_path / "a.gguf", kind=kind)
    assert text.channels
    assert text.thinking is REASONING["openai_gptoss"]
    ids = {marker: text.tokenizer.library.token_to_id(marker) for marker in (*MARKERS, "<|endoftext|>")}
    assert set(text.facts.eos_token_ids) == {ids["<|return|>"], ids["<|call|>"], ids["<|endoftext|>"]}
    prompt = text.render([{"role": "user", "content": "Hi 12"}])
    encoded = text.encode(prompt, add_special_tokens=False)
    assert encoded.count(ids["<|start|>"]) == prompt.count("<|start|>") == 3
    assert text.tokenizer.decode(encoded, skip_special_tokens=False) == prompt
    assert lead(text.tokenizer, encoded) == f"{START}assistant"
    begun = text.encode(f"{prompt}<|channel|>final<|message|>It <|", add_special_tokens=False)
    assert lead(text.tokenizer, begun) == f"{START}assistant{CHANNEL}final{MESSAGE}It <|"


def test_a_vocabulary_without_the_markers_is_refused_unless_channels_are_text(tmp_path: Path) -> None:
    markers = tuple(marker for marker in MARKERS if marker != "<|channel|>")
    with pytest.raises(ConfigError, match=r"has no token <\|channel\|>"):
        loaded(tmp_path / "a.gguf", markers)
    text = loaded(tmp_path / "b.gguf", markers, tool_call_parser="none", reasoning_parser="none")
    assert not text.channels
