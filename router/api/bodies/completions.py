"""Body of /v1/completions: texts or token ids to continue, or to fill in before a suffix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field, StrictBool

from kvferry.model_files.source import ModelFacts
from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.sampling import SamplingParams
from kvferry.router.api.bodies.fields import Prompt, Prompts, Top
from kvferry.router.api.bodies.generating import BadWords, GenerationBody
from kvferry.router.api.bodies.unsupported_fields import UnsupportedForCompletions
from kvferry.router.text.fill_in_middle import infill_marks
from kvferry.router.text.rendering import Rendering
from kvferry.router.text.text_model import TextModel

MAX_SEQUENCES = 1024
"""Largest number of sequences in one request."""
Suffix = Annotated[str, Field(description="text behind the place to fill, for models with fill-in-the-middle tokens")]


class CompletionBody(UnsupportedForCompletions, GenerationBody):
    """Body of POST /v1/completions; `prompt` becomes a list of texts and tuples of token ids."""

    prompt_field, output_default = "prompt", 16

    _ends: ClassVar[tuple[int, ...]] = ()
    """Default of a value that `prompts` derives, as in GenerationBody."""

    prompt: Prompts
    suffix: Suffix | None = None
    echo: StrictBool | None = False
    logprobs: Top | None = None
    add_special_tokens: StrictBool | None = True

    def check(self) -> None:
        """Raise InvalidRequest for too many sequences, and for no output without echo."""
        super().check()
        if not 1 <= len(self.prompt) * self.sequences() <= MAX_SEQUENCES:
            raise InvalidRequest(f"prompt: prompts times n (or best_of) must be 1 to {MAX_SEQUENCES}", param="prompt")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens must be at least 1, or 0 with echo", param="max_tokens")
        if self.suffix:
            self._check_suffix()

    def _check_suffix(self) -> None:
        """Raise InvalidRequest for fields that a suffix excludes: they count from the beginning of a plain prompt."""
        for field in ("echo", "truncate_prompt_tokens", "use_beam_search"):
            if getattr(self, field):
                raise InvalidRequest(f"{field} and suffix exclude each other", param=field)
        if not all(isinstance(each, str) for each in self.prompt):
            raise InvalidRequest("suffix needs prompts that are texts, not token ids", param="suffix")

    def prompts(self, text: TextModel) -> Sequence[Prompt | Rendering]:
        """Return the prompts as given, or in the model's marks around the place before the suffix."""
        if not self.suffix:
            return self.prompt
        marks = infill_marks(text, "suffix")
        vars(self)["_ends"] = marks.ends
        return [marks.prompt(prefix, self.suffix) for prefix in self.prompt]

    def sampling(self, facts: ModelFacts, max_tokens: int, bad_words: BadWords, drawn: int) -> SamplingParams:
        """Return the parameters; with a suffix the model's marks end the output too."""
        params = super().sampling(facts, max_tokens, bad_words, drawn)
        return replace(params, stop_token_ids=params.stop_token_ids + self._ends) if self._ends else params

    def marks_texts(self) -> bool:
        """Return whether to add special tokens; true by default."""
        return self.add_special_tokens is not False

    def top(self) -> int | None:
        """Return the requested number of log-probabilities."""
        return self.logprobs

    def prompt_top(self) -> int | None:
        """Return the number of prompt log-probabilities; echo shows those of the prompt too."""
        counts = [count for count in (self.prompt_logprobs, self.logprobs if self.echo else None) if count is not None]
        return max(counts, default=None)
