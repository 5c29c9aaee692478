"""Model section of `kvferry doctor`: family, path, number formats and memory by context length, without loading."""

from __future__ import annotations

from kvferry.cli.formats import kv_dtype, weight_bytes
from kvferry.cli.resource_plan import GIB, gpus, needs_of, take_seats
from kvferry.model_files.draft_model import resolve_draft
from kvferry.model_files.source import ModelFacts, ModelSource, read_facts
from kvferry.model_files.unsupported_models import require_runnable
from kvferry.protocol.settings import ServeSettings
from kvferry.runtime.limits import available_memory

MIB = 1 << 20


def told(settings: ServeSettings, source: ModelSource) -> str:
    """Describe a model for the report. Raises ConfigError with the reason if it cannot run here."""
    from kvferry.engine.models.route import route_of

    require_runnable(source)
    facts, route = read_facts(source), route_of(source, settings.model_impl)
    form = f"{source.name}, {facts.architecture} on {route.path}, {route.formats}"
    draft = resolve_draft(settings, source, weights=False)
    drafts = f"; {draft.name} drafts" if draft is not None else ""
    return f"{form}; {_memory(settings, source, facts)}{drafts}; {source.path}"


def _memory(settings: ServeSettings, source: ModelSource, facts: ModelFacts) -> str:
    """Describe the memory of one worker on the device where it would run."""
    needs, found, length = needs_of(source), gpus(), facts.max_model_len
    if not needs.layers:
        return f"{length} tokens, memory unknown"
    device = take_seats(settings, [needs], found)[0].device
    has = found[int(device.partition(":")[2] or 0)] if device.startswith("cuda") else available_memory()
    weights, kv = weight_bytes(settings, needs, device), needs.kv_bytes(kv_dtype(settings))
    if not kv:
        return f"weights {weights / GIB:.2f} GiB, texts of {length} tokens"
    longest = min(settings.max_model_len or length, length)
    room = max(0, int((has - weights) // kv))
    return (
        f"weights {weights / GIB:.2f} GiB, KV {1000 * kv / MIB:.1f} MiB for 1,000 tokens, {longest * kv / GIB:.2f} GiB "
        f"for its longest sequence of {longest} tokens; memory here holds KV of {room:,} tokens beside its weights"
    )
