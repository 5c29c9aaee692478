"""SpeechBatch: decode steps of all speech windows together: prompts and next tokens are rows of one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvferry.engine.speech.decoder import AttentionScores, Decoder, Row
from kvferry.engine.speech.rules import DecodingRules
from kvferry.engine.speech.window import Attempt, Reading
from kvferry.kernels.ops import Ops
from kvferry.kernels.sampling import NO_TOKEN, NoiseKeys
from kvferry.model_files.speech_config import SpeechConfig
from kvferry.protocol.errors import StepFailed
from kvferry.protocol.sampling import SamplingParams


class SpeechBatch:
    """Steps of the decoder. It belongs to the engine thread."""

    def __init__(self, decoder: Decoder, config: SpeechConfig, ops: Ops, device: torch.device) -> None:
        self._decoder, self._tokens, self._ops = decoder, config.tokens, ops
        self._rules = DecodingRules(config, device)

    def step(self, attempts: Sequence[Attempt]) -> list[Attempt]:
        """Draw the next token of each attempt; return those that ended. A failed one's future has its error.

        A new attempt's prompt is computed in the same step. A row's bits depend neither on other rows nor on their
        number, as far as the operations allow it."""
        rows, last, starts = list[Row](), list[int](), dict[int, int]()
        for index, attempt in enumerate(attempts):
            if not attempt.tokens:
                starts[index] = len(rows) + attempt.start
            rows += _next_rows(attempt)
            last.append(len(rows) - 1)
        hidden = self._decoder.hidden(rows)
        if self._tokens.no_speech >= 0 and starts:
            probs = self._decoder.logits(hidden[list(starts.values())]).softmax(-1)[:, self._tokens.no_speech]
            for index, prob in zip(starts, probs.tolist(), strict=True):
                attempts[index].no_speech_prob = prob
        logits = self._decoder.logits(hidden[last])
        self._rules.apply(logits, [attempt.tokens for attempt in attempts])
        drawn = self._ops.draw(
            logits,
            [SamplingParams(temperature=attempt.temperature) for attempt in attempts],
            NoiseKeys(
                tuple(attempt.seed for attempt in attempts),
                tuple(len(attempt.prompt) + len(attempt.tokens) for attempt in attempts),
            ),
        )
        chosen = (logits.gather(1, drawn.clamp(min=0)[:, None]).squeeze(1) - logits.logsumexp(-1)).tolist()
        return [
            attempt
            for attempt, token, logprob in zip(attempts, drawn.tolist(), chosen, strict=True)
            if self._take(attempt, token, logprob)
        ]

    def read(self, reading: Reading) -> torch.Tensor:
        """Return a reading's last logits, or the scores of its alignment heads, on the host."""
        window = reading.window
        rows = [Row(token, at, window.text, window.audio) for at, token in enumerate(reading.tokens)]
        scores = AttentionScores()
        hidden = self._decoder.hidden(rows, scores if reading.heads else None)
        return torch.stack(scores).cpu() if reading.heads else self._decoder.logits(hidden[-1:])[0].cpu()

    def _take(self, attempt: Attempt, token: int, logprob: float) -> bool:
        """Note a drawn token; return whether the attempt ended."""
        if token == NO_TOKEN:
            attempt.done.set_exception(StepFailed("the model's logits are not finite"))
            return True
        attempt.logprobs += logprob
        if token != self._tokens.end:
            attempt.tokens.append(token)
            if len(attempt.tokens) < attempt.limit:
                return False
        attempt.done.set_result(attempt.result)
        return True


def _next_rows(attempt: Attempt) -> list[Row]:
    """Return the rows that a step computes of an attempt: its prompt, or its last token."""
    window = attempt.window
    if not attempt.tokens:
        return [Row(token, at, window.text, window.audio) for at, token in enumerate(attempt.prompt)]
    at = len(attempt.prompt) + len(attempt.tokens) - 1
    return [Row(attempt.tokens[-1], at, window.text, window.audio)]
