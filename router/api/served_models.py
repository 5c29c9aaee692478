"""ServedModel, which turns request bodies into RequestSpecs for a model's nodes, and ServedModels, all by name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvferry.protocol.errors import InvalidRequest, ModelNotFound
from kvferry.protocol.hashing import namespace
from kvferry.protocol.model_metrics import ModelMetrics
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.settings import RouterSettings
from kvferry.protocol.work import Generate, Grammar, Work
from kvferry.router.api.bodies.context_length import context_exceeded
from kvferry.router.api.bodies.fields import Prompt
from kvferry.router.api.bodies.generating import BadWords, GenerationBody
from kvferry.router.dispatch.interface import Cluster, RequestSpec
from kvferry.router.dispatch.prompt_media import RenderedMedia
from kvferry.router.media.chat import MediaBody, MediaChat
from kvferry.router.media.loading import MediaLoader
from kvferry.router.media.prompting import MediaPrompter
from kvferry.router.request_context import RequestContext, drawn_seed, request_names
from kvferry.router.tenants.backlog import Backlog
from kvferry.router.tenants.scheduler_slots import SchedulerSlots
from kvferry.router.tenants.tenant_registry import TenantRegistry
from kvferry.router.text.bad_words import bad_word_ids
from kvferry.router.text.encoding import LONG_CHARS, Bound, Encoder
from kvferry.router.text.grammar_vocabulary import vocabulary_of
from kvferry.router.text.renderer import Renderer
from kvferry.router.text.rendering import Rendering
from kvferry.router.text.text_model import TextModel
from kvferry.structured_output.checker import Checker


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One served model: its text side, limits, nodes and queue; `adapter` (name, id) selects a LoRA adapter."""

    text: TextModel
    cluster: Cluster
    metrics: ModelMetrics
    encoder: Encoder
    renderer: Renderer
    turns: SchedulerSlots = field(default_factory=SchedulerSlots)
    checker: Checker | None = None
    """Tests grammars before nodes compile them; None: grammars are rejected."""
    adapter: tuple[str, str] = ("", "")
    media: MediaPrompter | None = None
    """Makes prompts with images, audio and video; None: they are refused."""
    backlog: Backlog | None = None
    """Requests waiting here for the nodes; None: not measured."""

    @property
    def name(self) -> str:
        """Return the model's name in answers."""
        return self.adapter[0] or self.text.name

    @property
    def max_model_len(self) -> int:
        """Return the limit of prompt and output tokens: the model's, or the nodes' if known and lower."""
        info = self.cluster.info()
        own = self.text.facts.max_model_len
        return min(own, info.max_model_len) if info is not None else own

    async def specs(self, call: RequestContext, body: GenerationBody, size: int = 0) -> list[RequestSpec]:
        """Return the first sequence of each of the body's prompts; raise InvalidRequest naming the field.

        `size` is the body's size in bytes; long ones are processed on another thread."""
        if (task := self.text.task).kind != "generate":
            raise InvalidRequest(f"the model {self.name!r} does not generate: {task.description}", param="model")
        if (chat := body.media_chat(self.text)) is not None:
            if body.truncate_prompt_tokens is not None:
                field = "truncate_prompt_tokens"
                raise InvalidRequest(f"{field} is not supported with media", param=field)
            made = await self.media_prompt(call, body, chat)
            bad_words = bad_word_ids(body.bad_words, self.text) if body.bad_words else ()
            grammar = await self._grammar(call, body, made.token_ids)
            return [replace(self._spec(call, call.id, body, made.token_ids, grammar, bad_words), media=made.media)]
        prompts = await self.prompts(body, call.tenant, size)
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        long = max(size, sum(map(len, texts))) >= LONG_CHARS
        if long:
            bound = Bound(self.max_model_len, body.prompt_field, body.truncate_prompt_tokens is not None)
            encoded = iter(await self.encoder.encode(texts, bound, add_special_tokens=body.marks_texts()))
        else:
            encoded = iter([self.encoder.short(text, add_special_tokens=body.marks_texts()) for text in texts])
        bad_words = bad_word_ids(body.bad_words, self.text) if body.bad_words else ()
        specs: list[RequestSpec] = []
        for name, prompt in zip(request_names(call, len(prompts)), prompts, strict=True):
            ids = next(encoded) if isinstance(prompt, str) else prompt
            if not specs:
                grammar = await self._grammar(call, body, ids)
            specs.append(self._spec(call, name, body, ids, grammar, bad_words))
            if long:
                await asyncio.sleep(0)
        return specs

    async def media_prompt(self, call: RequestContext, body: MediaBody, chat: MediaChat) -> RenderedMedia:
        """Return the prompt of a body's chat with media, which a node's engine makes; raise InvalidRequest."""
        try:
            if len(words := chat.words) >= LONG_CHARS:  # an engine would read a text of any length
                await self.encoder.encode(
                    [words], Bound(self.max_model_len, body.prompt_field), add_special_tokens=False
                )
            if self.media is None:
                raise InvalidRequest("this server takes no images, audio or video")
            return await self.media.prompt(chat, call, self.adapter[1], body)
        except InvalidRequest as error:
            error.param = error.param or body.prompt_field
            raise body.named(error) from error

    async def prompts(self, body: GenerationBody, tenant: str, size: int = LONG_CHARS) -> list[Prompt]:
        """Return the body's prompts, rendered; see `specs`."""
        short = size < LONG_CHARS
        prompts = body.prompts(self.text) if short else await self.encoder.on_thread(body.prompts, self.text, of=size)
        return [await self.renderer.render(each, tenant) if isinstance(each, Rendering) else each for each in prompts]

    def spec(
        self, call: RequestContext, request_id: str, token_ids: Sequence[int], work: Work, cache_salt: str | None
    ) -> RequestSpec:
        """Return the request of one validated prompt."""
        realm = namespace(call.realm, cache_salt or "")
        return RequestSpec(call, request_id, tuple(token_ids), work, realm, adapter=self.adapter[1])

    def check_ids(self, token_ids: Sequence[int], field: str) -> None:
        """Raise InvalidRequest unless the model's vocabulary has all of the token ids."""
        vocabulary = self.text.facts.vocab_size
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocabulary:
            raise InvalidRequest(f"token ids in {field} must be at least 0 and below {vocabulary}", param=field)

    async def _grammar(self, call: RequestContext, body: GenerationBody, prompt: Sequence[int]) -> Grammar | None:
        """Return the tested grammar of all outputs, or None; raise InvalidRequest naming the field."""
        requested = body.grammar(self.text, prompt)
        if requested is None:
            return None
        param, grammar = requested
        if body.use_beam_search:
            raise InvalidRequest(f"{param}: beam search does not support grammars", param=param)
        if self.checker is None:
            raise InvalidRequest("this server does not support grammars", param=param)
        await self.checker.check(grammar, param, call.tenant)
        return grammar

    def _spec(
        self,
        call: RequestContext,
        request_id: str,
        body: GenerationBody,
        token_ids: Sequence[int],
        grammar: Grammar | None,
        bad_words: BadWords,
    ) -> RequestSpec:
        field = body.prompt_field
        if not token_ids:
            raise InvalidRequest(f"{field} must hold at least one token", param=field)
        if body.truncate_prompt_tokens is not None:
            token_ids = token_ids[-body.truncate_prompt_tokens :]
        budget = self._budget(body, len(token_ids))
        self.check_ids(token_ids, field)
        params = body.sampling(self.text.facts, budget, bad_words, drawn_seed(call, request_id))
        return body.in_session(self.spec(call, request_id, token_ids, Generate(params, grammar), body.cache_salt))

    def _budget(self, body: GenerationBody, prompt_len: int) -> int:
        """Return max_tokens: the requested number, else the endpoint's default, else the rest of the context.

        A requested 0 (echo only) still takes one. Raises ContextLengthExceeded."""
        bound_field, requested = body.output_bound()
        limit = self.max_model_len
        room = limit - prompt_len
        needed = max(requested if requested is not None else min(room, body.output_default or room), 1)
        if needed > room:
            raise context_exceeded(prompt_len, needed, limit, body.prompt_field if room < 1 else bound_field)
        return needed


def pool_of(
    text: TextModel, cluster: Cluster, metrics: RouterMetrics, settings: RouterSettings, tenant_registry: TenantRegistry
) -> ServedModel:
    """Build the served model for these tenants."""
    turns = SchedulerSlots(cluster.capacity, metrics, shared=tenant_registry.several, most_queued=settings.max_queued)
    backlog = Backlog(lambda: turns.waiting, cluster.held, cluster.capacity)
    metrics.scaling.follow(text.name, backlog.prefill_s, backlog.decode_nodes, backlog.unplaced)
    encoder, renderer = Encoder(text, settings.max_prompt_tokens), Renderer(text.template)
    checker, loader = Checker(lambda: vocabulary_of(text)), MediaLoader.of(settings.allowed_media_domains)
    given = text.template.source if settings.chat_template and text.template is not None else ""
    media = MediaPrompter(loader, cluster.media, given)
    return ServedModel(
        text, cluster, metrics.of(text.name), encoder, renderer, turns, checker, media=media, backlog=backlog
    )


class ServedModels:
    """All served models by distinct names; without a name the first model is meant."""

    def __init__(self, first: ServedModel, *others: ServedModel) -> None:
        self.first = first
        self._pools = (first, *others)
        self._named = {name: pool for pool in self._pools for name in pool.text.called.all}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._pools)

    async def aclose(self) -> None:
        """End the processes that test grammars and those that render prompts, and connections to other servers."""
        parts = [each for pool in self._pools for each in (pool.checker, pool.renderer, pool.media) if each]
        await asyncio.gather(*(each.close() for each in parts))

    def ready(self) -> dict[str, dict[str, int]]:
        """Return the usable nodes of each role, by each model's first name."""
        return {pool.name: pool.cluster.ready() for pool in self}

    @property
    def trouble(self) -> str:
        """Return why the router is not ready, for the first such model (see `Cluster.trouble`); empty if ready."""
        return next(filter(None, [pool.cluster.trouble() for pool in self]), "")

    def names(self) -> list[str]:
        """Return the names of all models, with their adapters after them."""
        return [name for pool in self for name in (*pool.text.called.all, *pool.cluster.adapters.ids)]

    def serves(self, name: str) -> bool:
        """Return whether a model, not an adapter, has this name."""
        return name in self._named

    def pool(self, model: str | None) -> ServedModel:
        """Return the model, or the model with an adapter, of this name; raise ModelNotFound."""
        if not model:
            return self.first
        pool = self._named.get(model)
        if pool is None:
            for each in self._pools:
                if model in (ids := each.cluster.adapters.ids):
                    return replace(each, adapter=(model, ids[model]))
            adapters = [name for each in self._pools for name in each.cluster.adapters.ids]
            served = ", ".join(map(repr, [*self._named, *adapters]))
            raise ModelNotFound(f"the model {model!r} does not exist; this server serves {served}", param="model")
        return pool
