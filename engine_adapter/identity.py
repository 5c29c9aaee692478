"""Identity of an engine in the cluster: its fingerprint, and the ids of its LoRA adapters."""

from __future__ import annotations

import hashlib
from pathlib import PurePath

from kvferry.engine_adapter.engine import EngineFacts
from kvferry.protocol.adapters import AdapterName
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.layout import WIRE_VERSION


def model_name(facts: EngineFacts) -> str:
    """Return the model's name without the directories before it."""
    return PurePath(facts.model).name or facts.model


def first_role(facts: EngineFacts, role: str, *, elastic: bool) -> str:
    """Return the role in which a node that was started as `role` joins.

    An elastic one takes its engine's current role, which outlives an adapter. Raises ConfigError if it cannot."""
    if elastic and not facts.kv_role:
        raise ConfigError("an elastic node needs SGLang with --disaggregation-mode prefill or decode, and "
                          "--enable-pd-role-switch", param="elastic")  # fmt: skip
    role = facts.kv_role if elastic else role
    require_role(facts, role)
    return role


def require_role(facts: EngineFacts, role: str) -> None:
    """Raise ConfigError if the engine, given its --disaggregation-mode, cannot serve as a node of this role."""
    if facts.kv_role and facts.kv_role != role:
        raise ConfigError(f"the engine runs with --disaggregation-mode {facts.kv_role}: start its adapter with "
                          f"--role {facts.kv_role}", param="role")  # fmt: skip
    if facts.kind == "sglang" and role == "prefill" and not facts.kv_role:
        raise ConfigError("a prefill node needs SGLang with --disaggregation-mode prefill", param="role")


def fingerprint(facts: EngineFacts, revision: str, transfer: str = "") -> str:
    """Return the fingerprint: engines that share it continue each other's streams, and transfer blocks.

    It is 32 hex digits over kind and version of the engine, model, revision, arithmetic, block size and wire version.
    Engines do not report which weights they loaded, so `revision` comes from the operator. transfer: how engines fetch
    blocks from each other; NIXL does not connect two that were started with different paths of a model."""
    fields = [
        facts.kind, facts.version, model_name(facts), revision, facts.arithmetic, facts.block_size, WIRE_VERSION
    ]  # fmt: skip
    if transfer:
        fields += [transfer, facts.model]
    return hashlib.sha256("|".join(("engine", *map(str, fields))).encode()).hexdigest()[:32]


def adapter_names(facts: EngineFacts, revision: str) -> tuple[AdapterName, ...]:
    """Return the engine's LoRA adapters. An engine does not report their contents: the id covers name and revision."""
    return tuple(
        AdapterName(name, hashlib.sha256(f"{facts.kind}|{revision}|{name}".encode()).hexdigest()[:32])
        for name in facts.adapters
    )
