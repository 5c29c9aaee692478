"""LogprobWriter: log-probabilities in the formats of chat, legacy completions and vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.model_files.tokenizer import TextTokenizer
from kvferry.protocol.messages import TokenLogprobs
from kvferry.router.text.transcript import Entry

_FLOOR = -9999.0


class LogprobWriter:
    """Formatter of log-probabilities.

    `ids_as_tokens` (return_tokens_as_token_ids) writes tokens as `token_id:N`, which is unique."""

    def __init__(self, tokenizer: TextTokenizer, *, ids_as_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._ids_as_tokens = ids_as_tokens

    def chat(self, entries: Sequence[Entry], top: int) -> dict[str, Any]:
        """Return `choices[].logprobs` of chat: per token an object with its UTF-8 bytes and the `top` likeliest."""
        return {
            "content": [
                {
                    **self._chat_token(entry.logprobs.token_id, entry.logprobs.logprob),
                    "top_logprobs": [self._chat_token(*pair) for pair in entry.logprobs.top[:top]],
                }
                for entry in entries
            ]
        }

    def completion(self, entries: Sequence[Entry], top: int, *, offset: int = 0) -> dict[str, list[Any]]:
        """Return `choices[].logprobs` of completions: parallel lists; `offset` is added to each entry's offset."""
        return {
            "tokens": [self._legacy_token(entry.logprobs.token_id) for entry in entries],
            "token_logprobs": [_finite(entry.logprobs.logprob) for entry in entries],
            "top_logprobs": [self._legacy_top(entry.logprobs, top) for entry in entries],
            "text_offset": [offset + entry.offset for entry in entries],
        }

    def unpredicted(self, token_id: int) -> dict[str, list[Any]]:
        """Return the completions format for a prompt's first token, which has no log-probability."""
        return {
            "tokens": [self._legacy_token(token_id)],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [0],
        }

    def prompt(self, entries: Sequence[TokenLogprobs | None], top: int) -> list[dict[str, Any] | None]:
        """Return vLLM's `prompt_logprobs`: per token an object from token id to log-probability, rank and text."""
        return [None if entry is None else self._by_id(entry, top) for entry in entries]

    def _by_id(self, entry: TokenLogprobs, top: int) -> dict[str, Any]:
        ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top[:top], start=1)]
        return {
            str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._text(token_id)}
            for token_id, logprob, rank in [*ranked, (entry.token_id, entry.logprob, entry.rank)]
        }

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        text = f"token_id:{token_id}" if self._ids_as_tokens else data.decode("utf-8", "replace")
        return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}

    def _legacy_top(self, found: TokenLogprobs, top: int) -> dict[str, float]:
        """Return the `top` likeliest tokens and the token itself, which may be less likely than those."""
        likely = {self._legacy_token(token_id): _finite(logprob) for token_id, logprob in found.top[:top]}
        return {**likely, self._legacy_token(found.token_id): _finite(found.logprob)}

    def _legacy_token(self, token_id: int) -> str:
        r"""Return the token's text, or `bytes:\xe2\x82` for an incomplete character, as OpenAI does.

        This keeps tokens unique."""
        if self._ids_as_tokens:
            return f"token_id:{token_id}"
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    """Replace minus infinity, which JSON lacks, by -9999.0, which clients expect for impossible tokens."""
    return max(logprob, _FLOOR)
