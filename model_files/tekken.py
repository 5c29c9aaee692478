"""Builds a tokenizer from tekken.json, the only tokenizer file of some of Mistral's repositories; their chat template.

The file lists byte strings by rank, as tiktoken does: two neighbours are merged where the file has both together, the
lowest rank first. Special tokens come before them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from kvferry.protocol.errors import ConfigError

TEKKEN = "tekken.json"
BEGIN, END = "<s>", "</s>"
"""Special tokens at the beginning of a prompt, and at the end of an answer."""
MARKS = ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
"""Special tokens that `CHAT` writes; files of older versions lack them."""
CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role in ('system', 'developer') %}[SYSTEM_PROMPT]{% elif message.role == 'user' %}"
    "{{ '\n\n' if loop.previtem is defined and loop.previtem.role == 'user' else '[INST]' }}{% endif %}"
    "{% if message.content is string %}"
    "{{ message.content.rstrip() if message.role == 'assistant' and not loop.last else message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if 'audio' in part.type %}[BEGIN_AUDIO][AUDIO]{% elif 'image' in part.type %}[IMG]"
    "{% else %}{{ '\n\n' if loop.previtem is defined and loop.previtem.type == part.type }}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message.role in ('system', 'developer') %}[/SYSTEM_PROMPT]"
    "{% elif message.role == 'user' %}"
    "{{ '[/INST]' if loop.nextitem is not defined or loop.nextitem.role != 'user' }}"
    "{% elif not (loop.last and continue_final_message) %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Mistral's prompt of version 7, without tools: as mistral-common, it joins texts and messages of users in a row."""


def build_tekken(file: Path, spelled: Mapping[int, str]) -> Tokenizer:
    """Return the tokenizer. Raises ConfigError, or any other error for a damaged file.

    spelled: character of each byte in a byte-level vocabulary."""
    data = json.loads(file.read_bytes())
    config, special = data["config"], specials(data)
    ranks = _ranks(data["vocab"], config["default_vocab_size"] - len(special))
    names = {token: "".join(map(spelled.__getitem__, token)) for token in ranks}
    vocab = {names[token]: len(special) + rank for token, rank in ranks.items()}
    vocab |= {text: place for place, (text, _) in enumerate(special)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[*_merges(ranks, names)], ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(config["pattern"]), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(text, special=control, normalized=False) for text, control in special])
    made.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, made.token_to_id(BEGIN))]
    )
    return made


def tekken_template(path: Path) -> str | None:
    """Return the chat template of a directory that has a tekken.json and none of its own; None without that file.

    None, too, for files of older versions, whose prompts are others."""
    if not (file := path / TEKKEN).is_file():
        return None
    try:
        known = {text for text, _ in specials(json.loads(file.read_bytes()))}
    except (ConfigError, OSError, ValueError, KeyError, TypeError):
        return None
    return CHAT if known.issuperset(MARKS) else None


def specials(data: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Return the special tokens in order, and whether each has no text of its own; ids that nothing names are filled.

    Raises ConfigError for a file of a version before they were listed."""
    if not (listed := data.get("special_tokens")):
        raise ConfigError(f"{TEKKEN} lists no special_tokens, so it is of version 3 or earlier", param="model")
    named = {each["rank"]: (each["token_str"], bool(each.get("is_control", True))) for each in listed}
    count = data["config"]["default_num_special_tokens"]
    return [named.get(place, (f"<SPECIAL_{place}>", True)) for place in range(count)]


def _ranks(vocab: list[dict[str, Any]], count: int) -> dict[bytes, int]:
    """Return the first `count` byte strings, with their ranks."""
    return {base64.b64decode(each["token_bytes"]): each["rank"] for each in vocab[:count]}


def _merges(ranks: Mapping[bytes, int], names: Mapping[bytes, str]) -> Iterator[tuple[str, str]]:
    """Yield all pairs that make up a byte string, the lowest rank first."""
    for token in sorted(ranks, key=ranks.__getitem__):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                yield names[left], names[right]
