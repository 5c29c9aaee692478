"""What every endpoint shares: the model, the cluster, the settings, and how a body becomes prompts and specs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool

from protocol.errors import InvalidRequest, ModelNotFound
from protocol.metrics import RouterMetrics
from protocol.settings import RouterSettings
from router.api.sampling import output_budget, sampling_params
from router.api.schemas import ChatBody, CompletionBody, GenerationBody, TokenizeBody
from router.call import Call
from router.journey.spec import Cluster, RequestSpec
from router.text.text_model import TextModel
from router.text.transcript import TextOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

LONG_TEXT_CHARS = 16_384


@dataclass(frozen=True, slots=True)
class Serving:
    """One router's parts, as its endpoints see them."""

    settings: RouterSettings
    cluster: Cluster
    text: TextModel
    metrics: RouterMetrics

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together: the nodes' limit once one is known, never above the model's."""
        info = self.cluster.info()
        own = self.text.facts.max_model_len
        return min(own, info.max_model_len) if info is not None else own

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound unless `name` is this router's model; without a name it is meant."""
        if name and name != self.text.name:
            raise ModelNotFound(
                f"the model {name!r} does not exist here; this server has {self.text.name!r}", param="model"
            )

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text; long ones are encoded in a thread, since the event loop has streams to feed."""
        encode = self.text.encode

        def all_of_them() -> list[list[int]]:
            return [encode(text, add_special_tokens=add_special_tokens) for text in texts]

        long = sum(map(len, texts)) >= LONG_TEXT_CHARS
        return await run_in_threadpool(all_of_them) if long else all_of_them()

    async def render(self, body: ChatBody | TokenizeBody) -> list[int]:
        """Token ids of a chat's prompt. Raises InvalidRequest."""
        continues = bool(body.continue_final_message)
        if continues and body.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        extra = dict(body.chat_template_kwargs or {})
        if isinstance(body, ChatBody) and body.reasoning_effort is not None:
            extra.setdefault("reasoning_effort", body.reasoning_effort)
        prompt = self.text.render(
            body.messages or [],
            tools=body.tools,
            documents=body.documents if isinstance(body, ChatBody) else None,
            add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=continues,
            extra=extra,
        )
        return (await self.encode([prompt], add_special_tokens=bool(body.add_special_tokens)))[0]

    def spec(
        self,
        body: GenerationBody,
        call: Call,
        request_id: str,
        token_ids: Sequence[int],
        *,
        asked: int | None,
        asked_field: str = "max_tokens",
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> RequestSpec:
        """Spec of a prompt's first choice. `asked` is what the body's `asked_field` says. Raises InvalidRequest."""
        field, default = ("prompt", 16) if isinstance(body, CompletionBody) else ("messages", None)
        vocabulary = self.text.facts.vocab_size
        if not token_ids:
            raise InvalidRequest(f"{field} must hold at least one token", param=field)
        if min(token_ids) < 0 or max(token_ids) >= vocabulary:
            raise InvalidRequest(f"token ids in {field} must be at least 0 and below {vocabulary}", param=field)
        if body.truncate_prompt_tokens is not None:
            token_ids = token_ids[-body.truncate_prompt_tokens :]
        budget = output_budget(
            len(token_ids), asked, self.max_model_len, field=field, default=default, asked_field=asked_field
        )
        params = sampling_params(
            body, self.text, max_tokens=max(budget, 1), logprobs=logprobs, prompt_logprobs=prompt_logprobs
        )
        return RequestSpec(call, request_id, tuple(token_ids), params, body.cache_salt or "")


def text_options(body: GenerationBody, *, echo_only: bool = False) -> TextOptions:
    """How the body wants its output shown; a None in it means the default."""
    return TextOptions(
        stops=tuple(body.stop),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        echo_only=echo_only,
    )
