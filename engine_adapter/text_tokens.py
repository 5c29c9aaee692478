"""Token ids for the text of a server that sends none: at the end of each delta their text equals the server's."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.model_files.tokenizer import TextTokenizer
from kvferry.protocol.errors import ConfigError, StepFailed


class TextVocabulary:
    """Spells any text in tokens of a model. The tokenizer must be the caller's own: special tokens are turned off.

    The model may have drawn other tokens for the same text. Raises ConfigError for a vocabulary without tokens of
    single bytes, which cannot spell every text."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        if not tokenizer.byte_level and not tokenizer.byte_tokens:
            raise ConfigError("the tokenizer has no tokens of single bytes", param="tokenizer")
        self._tokenizer = tokenizer
        tokenizer.library.encode_special_tokens = True  # a special token's name in a text is text
        self._ids = _by_bytes(tokenizer)
        self._longest_token = max(map(len, self._ids))

    def token(self, text: str) -> int | None:
        """Return the token with exactly this text; None if there is none."""
        return self._ids.get(text.encode("utf-8", "replace"))

    def ids(self, text: str) -> tuple[int, ...]:
        """Return tokens whose text is exactly this one, which must hold whole characters.

        A text equal to one token becomes that token: servers usually send one at a time. Raises StepFailed for a
        character that the vocabulary cannot spell: another model wrote it."""
        data = text.encode()
        if (one := self._ids.get(data)) is not None:
            return (one,)
        for spelled in (text, text.removeprefix(" ")):  # some tokenizers put a space before each text
            found = self._tokenizer.library.encode_batch_fast([spelled], add_special_tokens=False)[0].ids
            if self.spells(found, data):
                return tuple(found)
        head, _, tail = text.partition(" ")
        if head and tail:
            return self.ids(head) + self.ids(" " + tail)
        return self._longest_first(data)

    def spells(self, ids: Sequence[int], data: bytes) -> bool:
        """Return whether the text of these tokens has exactly these bytes in UTF-8."""
        special, bytes_of = self._tokenizer.special_ids, self._tokenizer.token_bytes
        return special.isdisjoint(ids) and b"".join(map(bytes_of, ids)) == data

    def _longest_first(self, data: bytes) -> tuple[int, ...]:
        found: list[int] = []
        at = 0
        while at < len(data):
            end = min(len(data), at + self._longest_token)
            while (token := self._ids.get(data[at:end])) is None:
                end -= 1
                if end == at:
                    raise StepFailed(f"the tokenizer has no token for the byte {data[at]:#04x}: is it another model's?")
            found.append(token)
            at = end
        return tuple(found)


class TextTokens:
    """Turns the parts of one text into tokens as they come."""

    def __init__(self, vocabulary: TextVocabulary) -> None:
        self._vocabulary = vocabulary
        self._half = ""
        """First half of a surrogate pair whose second half comes with the next part."""

    def feed(self, text: str) -> tuple[int, ...]:
        """Return the tokens of the characters that are complete now."""
        text = self._half + text
        self._half = text[-1:] if "\ud800" <= text[-1:] <= "\udbff" else ""
        return self._spelled(text[: len(text) - len(self._half)])

    def finish(self) -> tuple[int, ...]:
        """Return the rest: a replacement character for half a pair."""
        half, self._half = self._half, ""
        return self._spelled(half)

    def _spelled(self, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        if not text.isascii():  # joins the halves of pairs, and replaces those that stand alone
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return self._vocabulary.ids(text)


def _by_bytes(tokenizer: TextTokenizer) -> dict[bytes, int]:
    """Return tokens by their bytes: a token with its own text has precedence over one of a single byte."""
    found: dict[bytes, int] = {}
    ids = sorted(set(tokenizer.library.get_vocab(with_added_tokens=True).values()) - tokenizer.special_ids)
    for token in sorted(ids, key=tokenizer.byte_tokens.__contains__):
        if data := tokenizer.token_bytes(token):
            found.setdefault(data, token)
    return found
