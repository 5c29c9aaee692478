"""What is put together from remembered parts is what the whole text encodes to."""

from __future__ import annotations

import random
from sys import getsizeof

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import kvferry.router.text.token_cache
from kvferry.model_files.source import DEMO_MODEL, resolve
from kvferry.model_files.tokenizer import load_tokenizer
from kvferry.router.text.token_cache import PATTERNS, TokenCache, cuts

CORPUS = (
    "the quick brown fox jumps over the lazy dog 12345 times, doesn't it?\n\n  It's what we'll see; "
    "caf\u00e9 na\u00efve \u4f60\u597d \u0440\u0443\u0441\u0441\u043a\u0438\u0439 the the of and to in\r\n"
) * 3
WORDS = [
    "the", " the", "a", " a", " ", "  ", "\n", "\t", "x y", "I'm", "1", "234", "<|end|>", "<|e", "nd|>", "e\u0301",
    "\u0301", "\u00e9", "\u4f60", "\U0001f600", ".", "...", "'s", "'S", "\u00a0", "\u2028", "Zz", " fox jumps",
]  # fmt: skip


def trained() -> str:
    """A small vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([CORPUS], trainer)
    return tokenizer.to_str()


TRAINED = trained()


def made(pattern: str | None, normalizer: normalizers.Normalizer | None = None, digits: bool = False) -> Tokenizer:
    tokenizer = Tokenizer.from_str(TRAINED)
    steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern:
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|bos|>", special=True)])
    bos = tokenizer.token_to_id("<|bos|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", bos)]
    )
    return tokenizer


def memo_of(tokenizer: Tokenizer, most: int = 2**20) -> TokenCache:
    def encode(some):
        return [each.ids for each in tokenizer.encode_batch_fast(list(some), add_special_tokens=False)]

    return TokenCache(tokenizer, encode, most)


KINDS = {
    "gpt2": made(None),
    "digits": made(None, digits=True),
    **{f"pattern{number}": made(pattern) for number, pattern in enumerate(sorted(PATTERNS))},
    "nfc": made(None, normalizers.NFC()),
    "demo": load_tokenizer(resolve(DEMO_MODEL, weights=False)).library,
}


@pytest.fixture(params=KINDS)
def tokenizer(request):
    return KINDS[request.param]


def drawn(source: random.Random) -> str:
    strange = "".join(chr(source.choice((source.randrange(32, 127), source.randrange(160, 0x3000)))) for _ in range(3))
    return "".join(source.choices([*WORDS, strange], k=source.randrange(80)))


def test_parts_make_the_whole(tokenizer, monkeypatch):
    assert cuts(tokenizer)
    source, memo = random.Random(1), memo_of(tokenizer)
    for number in range(60):
        monkeypatch.setattr(kvferry.router.text.token_cache, "PART_CHARS", source.choice((1, 3, 20)))
        first, special = drawn(source), number % 2 == 0
        for text in (first, first + drawn(source)):
            assert memo.ids(text, add_special_tokens=special) == tokenizer.encode(text, add_special_tokens=special).ids


def test_a_turn_of_a_chat_encodes_only_what_is_new():
    tokenizer, encoded = KINDS["demo"], []

    def encode(some):
        encoded.extend(some)
        return [each.ids for each in tokenizer.encode_batch_fast(list(some), add_special_tokens=False)]

    memo, source = TokenCache(tokenizer, encode), random.Random(1)
    text = "".join(
        f"<|im_start|>user\n{' '.join(source.choices(CORPUS.split(), k=900))}<|im_end|>\n" for _ in range(40)
    )
    memo.ids(text, add_special_tokens=False)
    encoded.clear()
    longer = text + "<|im_start|>assistant\nIt is what it was.<|im_end|>\n"
    assert memo.ids(longer, add_special_tokens=False) == tokenizer.encode(longer, add_special_tokens=False).ids
    assert sum(map(len, encoded)) < 2 * kvferry.router.text.token_cache.PART_CHARS < len(longer) / 10


def test_no_more_is_remembered_than_the_bound():
    memo = memo_of(KINDS["demo"], most=50_000)
    for number in range(30):
        memo.ids(f"part {number} of it " * 1000, add_special_tokens=False)
        memo.ids(f"\N{ROCKET}{number} " * 3000, add_special_tokens=False)
    assert memo._bytes == sum(getsizeof(part) + getsizeof(ids) for part, ids in memo._parts.items()) <= 50_000


def refused():
    spaced, ends = made(None), made(None)
    spaced.add_special_tokens([AddedToken("two words", special=True)])
    ends.add_special_tokens([AddedToken("<|u|>user ", special=True)])
    stripping = made(None)
    stripping.add_special_tokens([AddedToken("<|strip|>", special=True, rstrip=True)])
    other = made(None)
    other.pre_tokenizer = pre_tokenizers.Whitespace()
    meta = made(None)
    meta.pre_tokenizer = pre_tokenizers.Metaspace()
    unknown = made(None)
    unknown.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\w+ \w+|."), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    lower, cut = made(None, normalizers.Strip()), made(None)
    cut.enable_truncation(5)
    return {"spaced": spaced, "ends": ends, "stripping": stripping, "other": other, "meta": meta, "unknown": unknown,
            "lower": lower, "cut": cut, "words": Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))}  # fmt: skip


@pytest.mark.parametrize("kind", refused())
def test_tokenizers_of_which_it_is_not_known_are_left_alone(kind):
    assert not cuts(refused()[kind])
