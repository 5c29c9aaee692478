"""Body of POST /infill, with llama.cpp's field names, and its fill-in-the-middle prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import BaseModel, Field, StrictFloat

from kvferry.model_files.source import ModelFacts
from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.sampling import MAX_COUNT, SamplingParams
from kvferry.router.api.bodies.fields import MAX_ITEMS, Integer, Name, Prompt
from kvferry.router.api.bodies.generating import BadWords, GenerationBody
from kvferry.router.text.fill_in_middle import infill_marks
from kvferry.router.text.rendering import Rendering
from kvferry.router.text.text_model import TextModel
from kvferry.router.text.transcript import TextOptions


class InfillFile(BaseModel):
    """A part of another file, as context."""

    text: str = ""
    filename: Name = "tmp"


Files = Annotated[list[InfillFile], Field(fail_fast=True, max_length=MAX_ITEMS)]


class InfillBody(GenerationBody):
    """Body of POST /infill. `prompt` continues the prefix. With `n_predict` -1 only the context bounds the output."""

    prompt_field, output_default = "input_prefix", None

    _ends: ClassVar[tuple[int, ...]] = ()
    """Default of a value that `prompts` derives, as in GenerationBody."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Files | None = None
    prompt: str | None = None
    n_predict: Annotated[Integer, Field(ge=-1, le=MAX_COUNT)] | None = None
    repeat_penalty: StrictFloat | None = None

    def check(self) -> None:
        """Raise InvalidRequest for several choices, which the answer has no place for."""
        super().check()
        if self.sequences() != 1:
            raise InvalidRequest("n must be 1", param="n")

    def prompts(self, text: TextModel) -> Sequence[Prompt | Rendering]:
        """Return the prompt in the model's fill-in-the-middle tokens; raise InvalidRequest if it has none."""
        marks = infill_marks(text, "input_suffix")
        vars(self)["_ends"] = marks.ends
        files = [(each.filename, each.text) for each in self.input_extra or ()]
        return [marks.prompt(self.input_prefix + (self.prompt or ""), self.input_suffix, files)]

    def marks_texts(self) -> bool:
        """Return true: the model's special tokens begin the prompt."""
        return True

    def output_bound(self) -> tuple[str, int | None]:
        """Return the bound of the output; -1 is none."""
        if self.n_predict is None:
            return super().output_bound()
        return "n_predict", None if self.n_predict < 0 else self.n_predict

    def top(self) -> int | None:
        """Return None: the answer shows no log-probabilities."""
        return None

    def sampling(self, facts: ModelFacts, max_tokens: int, bad_words: BadWords, drawn: int) -> SamplingParams:
        """Return the parameters; a negative seed is drawn, and the model's marks end the output."""
        params = super().sampling(facts, max_tokens, bad_words, drawn)
        if self.repeat_penalty is not None and self.repetition_penalty is None:
            params = replace(params, repetition_penalty=self.repeat_penalty)
        if self.seed is not None and self.seed < 0:
            params = replace(params, seed=drawn)
        params = replace(params, stop_token_ids=params.stop_token_ids + self._ends)
        params.validate(facts.vocab_size)
        return params

    def text_options(self) -> TextOptions:
        """Return the display options; `n_predict: 0` only computes the prompt."""
        return replace(super().text_options(), echo_only=self.output_bound()[1] == 0)
