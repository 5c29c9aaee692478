"""CompletionFormat: format of /v1/completions choices, with legacy log-probabilities and echoed prompts."""

from __future__ import annotations

from typing import Any

from kvferry.router.api.bodies.completions import CompletionBody
from kvferry.router.api.formats.choice_format import ChoiceFormat, Collected
from kvferry.router.api.generation import Generation
from kvferry.router.api.sequence_stream import Choice
from kvferry.router.api.served_models import ServedModel
from kvferry.router.text.detokenizer import detokenizer
from kvferry.router.text.transcript import Entry, Piece


class CompletionFormat(ChoiceFormat[CompletionBody]):
    """Format of text completion choices. Implements `router.api.formats.choice_format.ChoiceFormat`."""

    id_prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, pool: ServedModel, body: CompletionBody, generation: Generation) -> None:
        super().__init__(pool, body, generation)
        self._echoes: dict[int, str] = {}
        self._echoed = body if body.echo else None

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}

    def begins_with_prompt(self) -> bool:
        return self._echoed is not None

    def piece_choice(self, choice: Choice, piece: Piece, *, first: bool) -> dict[str, Any]:
        shown = super().piece_choice(choice, piece, first=first)
        if first:
            shown["text"] = self._echo(choice) + shown["text"]
            shown |= self._prompt_ids(choice)
        return shown

    def whole_choice(self, choice: Choice, found: Collected) -> dict[str, Any]:
        whole = self.text_choice(choice.index, self._echo(choice) + "".join(found.text))
        whole["logprobs"] = self.logprobs(choice, found.entries, first=True)
        whole["finish_reason"], whole["stop_reason"] = found.finish_reason, found.stop_reason
        if self.prompt_top is not None:
            whole["prompt_logprobs"] = self.shown_prompt_logprobs(choice.prompt)
        if self.shows_ids:
            whole |= {**self._prompt_ids(choice), "token_ids": found.token_ids}
        return whole

    def logprobs(self, choice: Choice, entries: list[Entry], *, first: bool) -> dict[str, Any] | None:
        """Return the log-probabilities; with echo, text offsets count from the beginning of the prompt."""
        if self.top is None:
            return None
        shown = self.writer.completion(entries, self.top, offset=len(self._echo(choice)))
        if not (first and self._echoed is not None):
            return shown
        unpredicted = self.writer.unpredicted(choice.spec.token_ids[0])
        prompt = self.writer.completion(self._prompt_entries(choice), self.top)
        return {name: unpredicted[name] + prompt[name] + shown[name] for name in shown}

    def _prompt_ids(self, choice: Choice) -> dict[str, Any]:
        return {"prompt_token_ids": list(choice.spec.token_ids)} if self.shows_ids else {}

    def _echo(self, choice: Choice) -> str:
        """Return the prompt's text if echoed: the client's own if nothing was truncated, else decoded."""
        if (body := self._echoed) is None:
            return ""
        prompt = body.prompt[choice.prompt]
        if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
            return prompt
        found = self._echoes.get(choice.prompt)
        if found is None:
            skip = body.skip_special_tokens is not False
            found = self.tokenizer.decode(choice.spec.token_ids, skip_special_tokens=skip)
            self._echoes[choice.prompt] = found
        return found

    def _prompt_entries(self, choice: Choice) -> list[Entry]:
        """Return the log-probabilities of the prompt's tokens except the first, with their text offsets."""
        assert self._echoed
        output = detokenizer(self.tokenizer, skip_special_tokens=self._echoed.skip_special_tokens is not False)
        entries: list[Entry] = []
        offset = 0
        for token_id, found in zip(choice.spec.token_ids, self.prompt_logprobs.get(choice.prompt, ()), strict=False):
            if found is not None:
                entries.append(Entry(found, offset))
            offset += len(output.feed(token_id))
        return entries
