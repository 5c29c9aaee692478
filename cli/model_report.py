"""Describes a model for `kvferry doctor`: family, code path, number formats and memory, without loading it."""

from __future__ import annotations

from kvferry.cli.formats import kv_dtype, weight_bytes
from kvferry.cli.gpu_detection import gpus
from kvferry.cli.resource_plan import GIB, needs_of, plan_workers
from kvferry.engine.state_rows import ROWS
from kvferry.model_files.draft_model import resolve_draft
from kvferry.model_files.memory_needs import ModelNeeds
from kvferry.model_files.multimodal import is_multimodal, media_taken
from kvferry.model_files.source import ModelFacts, ModelSource, read_facts, read_json
from kvferry.model_files.unsupported_models import require_runnable
from kvferry.protocol.layer_groups import LayerGroups
from kvferry.protocol.settings import ServeSettings
from kvferry.runtime.limits import available_memory

MIB = 1 << 20
_TOWERS = {"image": "images, vision tower", "audio": "audio, audio tower"}
"""Media that a model takes besides text, and the tower that encodes them, by modality."""


def model_report(settings: ServeSettings, source: ModelSource) -> str:
    """Describe a model for the report. Raises ConfigError with the reason if it cannot run here."""
    from kvferry.engine.models.implementation import implementation_of
    from kvferry.worker.window_layers import divides

    require_runnable(source)
    facts, implementation = read_facts(source), implementation_of(source, settings.model_impl)
    form = f"{source.name}, {facts.architecture} on {implementation.path}, {implementation.formats}"
    draft = resolve_draft(settings, source, weights=False)
    drafts = f"; {draft.name} drafts" if draft is not None else ""
    memory = _memory(settings, source, facts, implementation.groups if divides(settings) else None)
    return f"{form}; {memory}{drafts}{_media(source)}; {source.path}"


def _media(source: ModelSource) -> str:
    """Describe the media that the model takes; empty for a text model."""
    if source.kind == "gguf":
        return ""
    config = read_json(source.path / "config.json")
    if modality := media_taken(config):
        return f"; takes {_TOWERS[modality]} of {needs_of(source).tower / 1e6:.0f}M weights"
    return "; its text alone: images and audio are refused" if is_multimodal(config) else ""


def _memory(settings: ServeSettings, source: ModelSource, facts: ModelFacts, groups: LayerGroups | None) -> str:
    """Describe the memory of one worker on the device where it would run.

    groups: groups of layers whose KV is kept for different times, or None."""
    needs, found, length = needs_of(source), gpus(), facts.max_model_len
    if not needs.layers:
        return f"{length} tokens, memory unknown"
    device = plan_workers(settings, [needs], found)[0].device
    has = found[int(device.partition(":")[2] or 0)] if device.startswith("cuda") else available_memory()
    weights, kv = weight_bytes(settings, needs, device), needs.kv_bytes(kv_dtype(settings))
    if not kv:
        return f"weights {weights / GIB:.2f} GiB, texts of {length} tokens"
    longest, size, windows = min(settings.max_model_len or length, length), settings.block_size, ""
    whole = longest * kv
    if groups is not None:
        kv = kv * groups.full // len(groups.windows)
        whole = groups.blocks(longest, size) * size * kv
        windows = f" and {groups.max_pages(size) * groups.count * size * kv / MIB:.1f} MiB for windows"
    room = max(0, int((has - weights) * longest // whole))
    return (
        f"weights {weights / GIB:.2f} GiB, KV {1000 * kv / MIB:.1f} MiB for 1,000 tokens{windows}, {whole / GIB:.2f} "
        f"GiB for its longest sequence of {longest} tokens; memory here holds KV of {room:,} tokens beside its weights"
        f"{_state(needs)}"
    )


def _state(needs: ModelNeeds) -> str:
    """Describe the memory of recurrent states; empty without recurrent layers."""
    if not needs.state_bytes:
        return ""
    size = needs.state_bytes / MIB
    return f"; recurrent state {size:.2f} MiB a checkpoint, {ROWS} times that a running request"
