"""DecodingRules: masks the tokens that Whisper may not write next: suppressed ones, and timestamps that go back.

The rules are those of the paper's reference decoder (Radford et al. 2022), applied before a token is drawn."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvferry.model_files.speech_config import SpeechConfig

_BANNED = float("-inf")


class DecodingRules:
    """Rules of one model."""

    def __init__(self, config: SpeechConfig, device: torch.device) -> None:
        tokens = config.tokens
        self._tokens, self._initial = tokens, config.max_initial_timestamp
        forbidden = [*config.suppressed, tokens.no_timestamps, tokens.start, tokens.previous]
        forbidden += [tokens.transcribe, tokens.translate, *([tokens.no_speech] if tokens.no_speech >= 0 else [])]
        self._forbidden = torch.tensor(sorted(set(forbidden)), device=device)
        self._forbidden_first = torch.tensor(config.suppressed_first, dtype=torch.int64, device=device)

    def apply(self, logits: torch.Tensor, written: Sequence[Sequence[int]]) -> None:
        """Mask float32 logits [n, vocabulary] in place. written: tokens of each row after its prompt."""
        first_time = self._tokens.timestamps
        logits.index_fill_(1, self._forbidden, _BANNED)
        for row, tokens in zip(logits, written, strict=True):
            self._apply_to(row, tokens)
        times = logits[:, first_time:].logsumexp(-1)
        texts = logits[:, :first_time].amax(-1)
        logits[:, :first_time].masked_fill_((times > texts)[:, None], _BANNED)

    def _apply_to(self, row: torch.Tensor, written: Sequence[int]) -> None:
        first_time, end = self._tokens.timestamps, self._tokens.end
        if not written:
            row.index_fill_(0, self._forbidden_first, _BANNED)
            row[:first_time] = _BANNED
            row[first_time + self._initial + 1 :] = _BANNED
            return
        ends_in_time = written[-1] >= first_time
        if ends_in_time and (len(written) < 2 or written[-2] >= first_time):
            row[first_time:] = _BANNED
        elif ends_in_time:
            row[:end] = _BANNED
        latest = next((token for token in reversed(written) if token >= first_time), None)
        if latest is not None:
            opens = ends_in_time and len(written) >= 2 and written[-2] < first_time
            row[first_time : latest if opens else latest + 1] = _BANNED
