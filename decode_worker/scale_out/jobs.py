"""Translation of a generate request of vLLM's API into a job of the node's engine, and the list of models."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from kvferry.decode_worker.scale_out.bodies import GenerateBody, SamplingBody
from kvferry.engine.admission import Admission
from kvferry.engine.engine import EngineConfig
from kvferry.protocol.adapters import AdapterName
from kvferry.protocol.errors import InvalidRequest, ModelNotFound
from kvferry.protocol.hashing import namespace
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate, Grammar
from kvferry.structured_output.requested import structured_outputs

_PLAIN = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
)
"""Fields that `SamplingParams` takes as they are."""
GRAMMAR_FIELD = "sampling_params.structured_outputs"


class Jobs:
    """Maker of jobs for one engine.

    longest: maximum number of tokens of prompt and output. names: the model's names. adapters: returns the node's LoRA
    adapters. router_id: router id to which the outputs are published."""

    def __init__(
        self,
        config: EngineConfig,
        longest: int,
        vocab_size: int,
        names: Sequence[str],
        adapters: Callable[[], Sequence[AdapterName]],
        *,
        eos_token_ids: tuple[int, ...],
        router_id: str,
        deadline_s: float,
    ) -> None:
        self._admission = Admission(longest, vocab_size, config.takes, names[0])
        self._longest, self._names, self._adapters = longest, names, adapters
        self._eos_token_ids, self._router_id, self._deadline_s = eos_token_ids, router_id, deadline_s

    @property
    def default_model(self) -> str:
        """Return the model's first name."""
        return self._names[0]

    def cards(self) -> list[dict[str, Any]]:
        """Return the entries of a list of models: the model's names, then the adapters with the model as parent."""
        root = {"object": "model", "owned_by": "kvferry", "root": self._names[-1], "max_model_len": self._longest}
        models = [{"id": name, **root, "parent": None} for name in dict.fromkeys(self._names)]
        return models + [{"id": each.name, **root, "parent": self._names[0]} for each in self._adapters()]

    def make(self, body: GenerateBody, name: str) -> Job:
        """Return the job with the request id `name`. Raises the error with which the engine would refuse it."""
        prompt = tuple(body.token_ids)
        job = Job(
            name,
            0,
            prompt,
            len(prompt),
            Generate(self._params(body.sampling_params, len(prompt)), _grammar(body.sampling_params)),
            self._router_id,
            namespace=namespace("", body.cache_salt or ""),
            deadline_s=self._deadline_s,
            adapter=self._adapter(body.model),
        )
        try:
            self._admission.check(job)
        except InvalidRequest as error:
            known = {"prompt": "token_ids", "model": "model", None: None}
            error.param = known.get(error.param, f"sampling_params.{error.param}")
            raise
        return job

    def _params(self, body: SamplingBody, prompt_len: int) -> SamplingParams:
        """Return the parameters; without max_tokens the output fills the context, without a seed one is drawn."""
        room = max(1, self._longest - prompt_len)
        given = {name: value for name in _PLAIN if (value := getattr(body, name)) is not None}
        return SamplingParams(
            **given,
            max_tokens=min(room, body.max_tokens or room),
            seed=random.getrandbits(63) if body.seed is None else body.seed,
            logit_bias=tuple((_token_id(token), bias) for token, bias in (body.logit_bias or {}).items()),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            eos_token_ids=self._eos_token_ids,
            allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
            bad_words=tuple(map(tuple, body.bad_words or ())),
        )

    def _adapter(self, model: str | None) -> str:
        """Return the id of the adapter with this name; empty for the model's own names."""
        if not model or model in self._names:
            return ""
        held = {each.name: each.id for each in self._adapters()}
        if model not in held:
            served = ", ".join(map(repr, (*self._names, *held)))
            raise ModelNotFound(f"the model {model!r} does not exist; this node serves {served}", param="model")
        return held[model]


def _grammar(body: SamplingBody) -> Grammar | None:
    grammar_fields = body.structured_outputs
    if grammar_fields is None or all(value in (None, False) for value in grammar_fields.values()):
        return None
    return structured_outputs(grammar_fields, GRAMMAR_FIELD)


def _token_id(text: str) -> int:
    if not text.isdecimal() or len(text) > 10:
        field = "sampling_params.logit_bias"
        raise InvalidRequest(f"{field}: {text[:20]!r} is not a token id", param=field)
    return int(text)
