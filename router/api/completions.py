"""POST /v1/completions: it continues texts or token ids, with echo and legacy log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protocol.errors import InvalidRequest
from router.api.generation import Choice, Generation
from router.api.reply import Reply
from router.api.sampling import check_logprobs
from router.api.schemas import CompletionBody, Prompt, parse, reject_unbuilt
from router.api.serving import Serving, text_options
from router.api.sse import TextEvent, event
from router.call import Call
from router.journey.spec import RequestSpec
from router.text.detokenizer import detokenizer
from router.text.transcript import Entry, Piece

MAX_SEQUENCES = 1024


class CompletionEndpoint:
    name = "/v1/completions"

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def begin(self, data: bytes, call: Call) -> Reply:
        """See Endpoint."""
        serving, body = self._serving, parse(CompletionBody, data)
        serving.check_model(body.model)
        reject_unbuilt(body)
        check_logprobs("logprobs", body.logprobs)
        n = body.n or 1
        if not 1 <= len(body.prompt) * n <= MAX_SEQUENCES:
            raise InvalidRequest(f"prompt: prompts times n must be 1 to {MAX_SEQUENCES}", param="prompt")
        if body.max_tokens == 0 and not body.echo:
            raise InvalidRequest("max_tokens must be at least 1, or 0 with echo", param="max_tokens")
        prompts = await self._token_ids(body)
        specs = [self._spec(body, call, number, token_ids) for number, token_ids in enumerate(prompts)]
        options = text_options(body, echo_only=body.max_tokens == 0)
        generation = Generation(serving.cluster, serving.metrics, serving.text.tokenizer, specs, options, n=n)
        return CompletionReply(serving, body, generation, call)

    async def _token_ids(self, body: CompletionBody) -> list[Sequence[int]]:
        prompts: list[Prompt] = body.prompt
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(await self._serving.encode(texts, add_special_tokens=body.add_special_tokens is not False))
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]

    def _spec(self, body: CompletionBody, call: Call, number: int, token_ids: Sequence[int]) -> RequestSpec:
        wanted = [count for count in (body.prompt_logprobs, body.logprobs if body.echo else None) if count is not None]
        return self._serving.spec(
            body,
            call,
            call.id if len(body.prompt) == 1 else f"{call.id}-p{number}",
            token_ids,
            asked=body.max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=max(wanted, default=None),
        )


class CompletionReply(Reply):
    """The legacy shapes. With echo, each choice begins with its prompt's text and log-probabilities."""

    def __init__(self, serving: Serving, body: CompletionBody, generation: Generation, call: Call) -> None:
        super().__init__(serving, body, generation, f"cmpl-{call.id}")
        self._body = body
        self._plain: dict[int, TextEvent] = {}
        self._echoes: dict[int, str] = {}

    def chunk_base(self) -> dict[str, Any]:
        return {**self.base, "object": "text_completion"}

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        self.note_prompt(choice, piece)
        first = choice.index not in self._plain
        if first:
            shape = self._choice(choice.index, TextEvent.SLOT)
            self._plain[choice.index] = TextEvent(self.with_usage({**self.chunk_base(), "choices": [shape]}))
        wants_ids = bool(self.request.return_token_ids)
        echo = first and bool(self._body.echo)
        if piece.finish_reason is None and not (piece.entries or echo or self.running_usage or wants_ids):
            return self._plain[choice.index].fill(piece.text) if piece.text else b""
        if not (piece.text or piece.finish_reason or piece.entries or echo or (wants_ids and piece.token_ids)):
            return b""
        shown = self._choice(choice.index, (self._echo(choice) if echo else "") + piece.text)
        shown["logprobs"] = self._logprobs(choice, piece.entries, echo=echo)
        shown["finish_reason"], shown["stop_reason"] = piece.finish_reason, piece.stop_reason
        if wants_ids:
            shown["token_ids"] = list(piece.token_ids)
            shown |= {"prompt_token_ids": list(choice.spec.token_ids)} if first else {}
        return event(self.with_usage({**self.chunk_base(), "choices": [shown]}))

    def body(self) -> dict[str, Any]:
        return {
            **self.chunk_base(),
            "choices": [self._whole(choice) for choice in self.generation.choices],
            "usage": self.generation.usage(),
        }

    def _whole(self, choice: Choice) -> dict[str, Any]:
        found, echo = self.collected[choice.index], bool(self._body.echo)
        whole = self._choice(choice.index, (self._echo(choice) if echo else "") + "".join(found.text))
        whole["logprobs"] = self._logprobs(choice, found.entries, echo=echo)
        whole["finish_reason"], whole["stop_reason"] = found.finish_reason, found.stop_reason
        if self._body.prompt_logprobs is not None:
            prompt = self.prompt_logprobs.get(choice.prompt, ())
            whole["prompt_logprobs"] = self.writer.prompt(prompt, self._body.prompt_logprobs)
        if self.request.return_token_ids:
            whole |= {"prompt_token_ids": list(choice.spec.token_ids), "token_ids": found.token_ids}
        return whole

    def _echo(self, choice: Choice) -> str:
        """The prompt as text: the client's own where nothing was cut off it, else decoded from its tokens."""
        prompt: Prompt = self._body.prompt[choice.prompt]
        if isinstance(prompt, str) and self._body.truncate_prompt_tokens is None:
            return prompt
        found = self._echoes.get(choice.prompt)
        if found is None:
            skip = self._body.skip_special_tokens is not False
            found = self.tokenizer.decode(choice.spec.token_ids, skip_special_tokens=skip)
            self._echoes[choice.prompt] = found
        return found

    def _logprobs(self, choice: Choice, entries: list[Entry], *, echo: bool) -> dict[str, Any] | None:
        top = self._body.logprobs
        if top is None:
            return None
        shown = self.writer.completion(entries, top, offset=len(self._echo(choice)) if self._body.echo else 0)
        if not echo:
            return shown
        first = self.writer.unpredicted(choice.spec.token_ids[0])
        prompt = self.writer.completion(self._prompt_entries(choice), top)
        return {name: first[name] + prompt[name] + shown[name] for name in shown}

    def _prompt_entries(self, choice: Choice) -> list[Entry]:
        """Log-probabilities of the prompt's tokens but the first, with their places in its text."""
        steps = detokenizer(self.tokenizer, skip_special_tokens=self._body.skip_special_tokens is not False)
        entries: list[Entry] = []
        offset = 0
        for token_id, found in zip(choice.spec.token_ids, self.prompt_logprobs.get(choice.prompt, ()), strict=False):
            if found is not None:
                entries.append(Entry(found, offset))
            offset += len(steps.step(token_id))
        return entries

    @staticmethod
    def _choice(index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}
