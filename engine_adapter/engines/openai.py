"""Client of any server with the OpenAI completions API; uses token ids as far as the server sends them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvferry.engine_adapter.engine import EngineCall, EngineDelta, EngineFacts, EngineLoad
from kvferry.engine_adapter.engine_errors import failure
from kvferry.engine_adapter.engines import openai_params
from kvferry.engine_adapter.engines.openai_answer import Answer, Ended, token_ids
from kvferry.engine_adapter.http_client import HEALTH_S, EngineHttp
from kvferry.engine_adapter.prometheus_text import value
from kvferry.engine_adapter.text_tokens import TextVocabulary
from kvferry.model_files.source import read_facts, resolve
from kvferry.model_files.tokenizer import load_tokenizer
from kvferry.protocol.errors import ConfigError, InvalidRequest, KvferryError, NodeDown, Overloaded, StepFailed
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams

log = logging.getLogger("kvferry.adapter")

COMPLETIONS, MODELS, HEALTH = "/v1/completions", "/v1/models", "/health"
BLOCK_SIZE = 16
"""Tokens per block in kvferry's index: no such server reports its own."""
ASSUMED_TOKENS = 2**19
"""Tokens of a server's cache, to estimate its load: no such server reports them."""
PROBE = EngineCall("kvferry-probe", tuple(range(40, 48)), SamplingParams(temperature=0.0, max_tokens=2))
CREATED_S = 1.1
"""Seconds between two reads of a model's `created`, which some servers set to the time of the request."""


@dataclass(frozen=True, slots=True)
class _Form:
    """What a server's answers are like. exact: they have token ids. extras: it accepts fields beyond the API."""

    exact: bool
    extras: bool
    fingerprint: str


class OpenaiEngine:
    """Client of one server. Implements `engine.Engine`; call `facts` before all other calls but `health`.

    model       the server's name for it; empty: the only one that it serves
    tokenizer   model whose files hold the tokenizer (see `model_files.source.resolve`); needed for servers that send
                only text, and for the context length where a server does not report it; empty: none

    The API has no salt for tenants: a server that does not know `cache_salt` shares its prefix cache between them."""

    media = pooling = None

    def __init__(self, http: EngineHttp, model: str = "", tokenizer: str = "") -> None:
        self._http, self._model, self._files = http, model, tokenizer
        self._health_path, self._was_well = HEALTH, False
        self._form = _Form(True, True, "")
        self._vocabulary: TextVocabulary | None = None
        self._context = 0
        self._created = self._metrics = False
        self._running = self._tokens = 0

    async def facts(self) -> EngineFacts:
        """Return what the server reports. Raises ConfigError if it cannot be used as a node's engine."""
        models = await self._models()
        base = self._chosen(models)
        self._model = base["id"]
        self._read_files()
        length = _length(base) or self._context
        if not length:
            raise ConfigError("the server does not report its context length: name the model's files",
                              param="tokenizer")  # fmt: skip
        self._form = form = await self._probe()
        if form.exact:
            log.info("the server at %s returns token ids", self._http.url)
        elif self._vocabulary is None:
            raise ConfigError("the server sends text without token ids: name its tokenizer", param="tokenizer")
        else:
            log.warning("the server at %s sends only text: token ids are computed from it", self._http.url)
        return EngineFacts(
            kind="openai",
            version=form.fingerprint,
            process=await self._find_identity(),
            model=base.get("root") or self._model,
            served_names=(self._model,),
            max_model_len=length,
            block_size=BLOCK_SIZE,
            total_blocks=ASSUMED_TOKENS // BLOCK_SIZE,
            arithmetic="token ids" if form.exact else "text",
            adapters=tuple(each["id"] for each in models if each.get("parent") == self._model),
            exact=form.exact,
        )

    async def health(self) -> None:
        """Return if the server is well: by its /health, or by its list of models if it has none."""
        try:
            await self._http.text(self._health_path, HEALTH_S)
        except (Overloaded, StepFailed) as error:
            if self._was_well or self._health_path != HEALTH or isinstance(error, Overloaded):
                raise NodeDown(f"the engine reports that it is unhealthy: {error.message}") from error
            await self._http.text(MODELS, HEALTH_S)
            self._health_path = MODELS
        self._was_well = True

    async def load(self) -> EngineLoad:
        """Return the load by what this adapter sent, and the server's process as far as it is known."""
        usage = min(1.0, self._tokens / ASSUMED_TOKENS)
        return EngineLoad(await self._process(), self._running, cache_usage=usage)

    def check(self, job: Job) -> None:
        """Raise InvalidRequest for what the API cannot do."""
        openai_params.check(job, exact=self._form.exact)

    async def generate(self, call: EngineCall, deliver: Callable[[EngineDelta], None]) -> None:
        """Run a call. The delta with the finish_reason waits for the usage after it."""
        answer = Answer(call.params, self._vocabulary, deliver, exact=self._form.exact)
        body = openai_params.body(call, call.adapter or self._model, extras=self._form.extras)
        tokens = len(call.token_ids)
        self._running, self._tokens = self._running + 1, self._tokens + tokens
        try:
            await self._http.stream(COMPLETIONS, body, answer.event)
        except Ended:
            pass
        except NodeDown:
            if answer.last is None:
                raise
        finally:
            self._running, self._tokens = self._running - 1, self._tokens - tokens
        answer.end()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    def _read_files(self) -> None:
        """Read the model's files, once. Raises ConfigError."""
        if self._files and self._vocabulary is None:
            source = resolve(self._files, weights=False)
            self._context = read_facts(source).max_model_len
            self._vocabulary = TextVocabulary(load_tokenizer(source))

    async def _models(self) -> list[dict[str, Any]]:
        reported = await self._http.get(MODELS)
        found = reported.get("data") if isinstance(reported, dict) else None
        if not isinstance(found, list) or not all(isinstance(each, dict) and each.get("id") for each in found):
            raise ConfigError(f"{self._http.url}{MODELS} is not a list of models: is it the URL of an OpenAI server?",
                              param="url")  # fmt: skip
        return found

    def _chosen(self, models: list[dict[str, Any]]) -> dict[str, Any]:
        base = [each for each in models if each["id"] == self._model or not (self._model or each.get("parent"))]
        if len(base) != 1:
            names = ", ".join(str(each["id"]) for each in models[:20]) or "none"
            raise ConfigError(f"name one of the models that the server serves: {names}", param="engine_model")
        return base[0]

    async def _probe(self) -> _Form:
        """Send short requests, the first with fields that the API does not name, and return the form of the answer."""
        try:
            return await self._probed(extras=True)
        except InvalidRequest as error:
            log.info("not using fields beyond the API: %s", error.message)
        try:
            return await self._probed(extras=False)
        except InvalidRequest as error:
            raise ConfigError(
                f"the server refuses token ids as the prompt of {COMPLETIONS}: {error.message}", param="url"
            ) from error

    async def _probed(self, *, extras: bool) -> _Form:
        chunks: list[dict[str, Any]] = []
        await self._http.stream(COMPLETIONS, openai_params.body(PROBE, self._model, extras=extras), chunks.append)
        if not all(isinstance(chunk, dict) for chunk in chunks):
            raise StepFailed("the engine's answer has events that are not JSON objects")
        if error := next((chunk["error"] for chunk in chunks if chunk.get("error")), None):
            raise failure(error)
        choices = [choice for chunk in chunks for choice in chunk.get("choices") or ()]
        if not choices:
            raise StepFailed(f"the engine's answer to {COMPLETIONS} is not a stream of completions")
        reported = next((str(chunk["system_fingerprint"]) for chunk in chunks if chunk.get("system_fingerprint")), "")
        return _Form(extras and any(map(token_ids, choices)), extras, reported[:64])

    async def _find_identity(self) -> str:
        """Find how one process of the server differs from the next, and return its id."""
        first = await self._began(created=True, metrics=True)
        await asyncio.sleep(CREATED_S)
        second = await self._began(created=True, metrics=True)
        self._created, self._metrics = (old == new != 0 for old, new in zip(first, second, strict=True))
        return await self._process()

    async def _process(self) -> str:
        """Return an id that changes with each start of the server; empty if unknown."""
        of_model, of_process = await self._began(created=self._created, metrics=self._metrics)
        return f"{of_model:.12g} {of_process:.12g}" if self._created or self._metrics else ""

    async def _began(self, *, created: bool, metrics: bool) -> tuple[float, float]:
        """Return the times at which model and process began, of those requested; 0: unknown."""
        of_model = of_process = 0.0
        if created:
            reported = self._chosen(await self._models()).get("created")
            of_model = float(reported) if isinstance(reported, int | float) else 0.0
        if metrics:
            try:
                of_process = value(await self._http.text("/metrics"), "process_start_time_seconds")
            except KvferryError as error:
                if not isinstance(error, StepFailed | InvalidRequest):
                    raise
        return of_model, of_process


def _length(model: dict[str, Any]) -> int:
    """Return the length of the context under the names that servers have for it; 0: unknown."""
    meta = model.get("meta") or {}
    for reported in (
        model.get("max_model_len"),
        meta.get("n_ctx"),
        model.get("context_length"),
        model.get("context_window"),
    ):
        if isinstance(reported, int) and reported > 0:
            return reported
    return 0
