"""Checks of `kvferry doctor` for other engines: whether each server was started with the flags its adapter needs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from kvferry.cli.check_result import Result
from kvferry.cli.doctor import Check, port, redis
from kvferry.engine_adapter.engine import Engine, EngineCall, EngineDelta, EngineFacts
from kvferry.engine_adapter.main import engine_client
from kvferry.engine_adapter.measured_pooling import measured_pooling
from kvferry.engine_adapter.node_loading import require_elastic
from kvferry.protocol.errors import ConfigError, KvferryError
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.settings import ServeSettings

REFUSED = {
    "vllm": "start it with --enable-scale-out",
    "sglang": "start it with a model that generates",
    "llamacpp": "start llama-server with a model that generates, and with --slots",
    "openai": "choose a server whose POST /v1/completions takes token ids as the prompt",
}
"""Remedies by kind, for an engine that refuses requests in tokens."""
SOCKETS = '"publisher": "zmq", "endpoint": "ipc:///run/kvferry/events", "replay_endpoint": "ipc:///run/kvferry/replay"'
EVENTS = {
    "vllm": f"--kv-events-config '{{\"enable_kv_cache_events\": true, {SOCKETS}}}'",
    "sglang": f"--page-size 16 --kv-events-config '{{{SOCKETS}}}'",
}
"""Flags by kind that make the engine publish KV events."""
DETAILS = {"vllm": "--enable-prompt-tokens-details"}
"""Flags by kind that make the engine report the reused tokens."""
NIXL = (
    '--kv-transfer-config \'{"kv_connector": "NixlConnector", "kv_role": "kv_both", '
    '"kv_load_failure_policy": "recompute"}\''
)
"""Flag that makes vLLM compute prompts for other engines, and fetch blocks from them."""
PROMPT = tuple(range(40, 56))


def engine_checks(settings: ServeSettings) -> list[tuple[str, Check]]:
    """Return the checks of a cluster whose nodes are engines that run already."""
    return [("redis", redis), ("port", port), *((f"engine {url}", _of(url)) for url in settings.attach)]


def _of(url: str) -> Check:
    return lambda settings: asyncio.run(check_engine(settings, url))


async def check_engine(settings: ServeSettings, url: str) -> Result:
    """Check one engine: its kind, and the flags that it lacks. Raises ConfigError if it does not answer."""
    kind, engine = settings.engine, engine_client(settings.engine, url, settings, settings.model[0])
    try:
        try:
            await engine.health()
            facts = await engine.facts()
        except ConfigError:
            raise
        except KvferryError as error:
            raise ConfigError(f"{error.message}; start it, or correct the URL and --engine") from error
        found = f"{url} is {facts.kind} {facts.version} with {facts.model}, blocks of {facts.block_size} tokens"
        if facts.kv_role:
            return await _half(settings, engine, facts, found)
        if settings.elastic:
            remedy = "start SGLang with --disaggregation-mode and --enable-pd-role-switch, or leave out --elastic"
            return Result("fail", "engine", f"{found}: it cannot change between prefill and decode", remedy)
        deltas: list[EngineDelta] = []
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        try:
            await engine.generate(EngineCall("kvferry-doctor", PROMPT, params), deltas.append)
        except KvferryError as error:
            if tasks := (await measured_pooling(engine)).tasks:
                return Result("ok", "engine", f"{found}: it generates nothing, but can {' and '.join(tasks)}")
            return Result("fail", "engine", f"{url} refuses token ids: {error.message}", REFUSED[kind])
        missing = list(_missing(settings, kind, facts, deltas))
        if facts.kv_transfer:
            found += f", which transfers KV blocks by {facts.kv_transfer}"
        if missing:
            reasons = "; ".join(why for why, _ in missing)
            return Result("warn", "engine", f"{found}: {reasons}", "add " + " and ".join(flag for _, flag in missing))
        return Result("ok", "engine", found)
    finally:
        await engine.close()


async def _half(settings: ServeSettings, engine: Engine, facts: EngineFacts, found: str) -> Result:
    """Return the result for an engine that does only prefill or decode, and may change its role."""
    found += f": it does only {facts.kv_role}"
    remedy = f"start kvferry adapt --engine {facts.kind} --role {facts.kv_role} beside it, not serve"
    try:
        await require_elastic(engine, facts.kv_role, 0.0)
    except ConfigError as error:
        if settings.elastic:
            return Result("fail", "engine", f"{found}: {error.message}", "start SGLang with --enable-pd-role-switch")
        return Result("warn", "engine", f"{found}, and cannot change it", f"{remedy}; for --elastic, start SGLang with "
                      "--enable-pd-role-switch")  # fmt: skip
    return Result("warn", "engine", f"{found}, and can change it", f"{remedy}; add --elastic if it may change")


def _missing(
    settings: ServeSettings, kind: str, facts: EngineFacts, deltas: list[EngineDelta]
) -> Iterator[tuple[str, str]]:
    """Yield each missing feature of the engine, and the flag that adds it."""
    if settings.prefill_engines and not facts.kv_transfer:
        yield "it transfers no KV blocks, as its metrics show none of NIXL", NIXL
    if kind in EVENTS and facts.kv_events is None:
        yield "it publishes no KV events, so its cache is unknown", EVENTS[kind]
    elif facts.kv_events is not None and not facts.kv_events.replay:
        yield "it replays no KV events, so each lost one empties the map of its cache", "a replay_endpoint to them"
    if kind == "openai":
        if not facts.exact:
            yield "it sends only text, so no stream survives its death exactly", "support of return_token_ids"
        if deltas[-1].cached_tokens is None:
            yield "it does not report the reused tokens, so accounts are empty", "prompt_tokens_details to its usage"
    if kind in DETAILS and deltas[-1].cached_tokens is None:
        yield "it does not report the reused tokens, so accounts are empty", DETAILS[kind]
    if kind == "sglang" and facts.block_size < 16:
        yield f"its pages have {facts.block_size} tokens, so its map is large", "--page-size 16"
