"""CanaryRelease: sends a share of new requests to the nodes of one engine or version."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from kvferry.protocol.settings import RouterSettings
from kvferry.router.dispatch.interface import RequestSpec
from kvferry.router.nodes.model_nodes import FingerprintGroup, ModelNodes, holds

NEWEST = "newest"
"""Name of the group whose first node started last."""


@dataclass(frozen=True, slots=True)
class CanaryRelease:
    """Share of new requests for the canary, which is the groups that `engine` names.

    weight     share, from 0 to 1
    engine     prefix of the name of the nodes' engine ("kvferry" for its own) or of their fingerprint, or NEWEST
    by_tenant  draw the share by tenants instead of requests
    """

    weight: float
    engine: str = NEWEST
    by_tenant: bool = False

    @classmethod
    def of(cls, settings: RouterSettings) -> Self | None:
        """Return the canary release of these settings, if any."""
        if settings.canary_weight < 0:
            return None
        return cls(settings.canary_weight, settings.canary_engine, settings.canary_by == "tenant")

    def takes(self, tenant: str, request_id: str) -> bool:
        """Return whether a new request goes to the canary: the same in every router and for every choice of a call."""
        drawn = hashlib.sha256(f"{tenant}\0{'' if self.by_tenant else request_id}".encode()).digest()
        return int.from_bytes(drawn[:8], "big") < self.weight * 2**64

    def groups(self, model: ModelNodes, spec: RequestSpec, *, again: bool) -> Sequence[FingerprintGroup]:
        """Return the groups for a request: the canary or all other groups, or every group if no node there can take it.

        `again`: an attempt failed or is late, so that the canary has had its chance."""
        newest = max(model.groups, key=lambda group: group.first_epoch, default=None)
        canary = not again and self.takes(spec.call.tenant, spec.call.id)
        chosen = [group for group in model.groups if self._is_canary(group, newest) == canary]
        able = any(
            view.role == "decode" and holds(view.lease, spec.adapter) and len(spec.token_ids) < view.pool_tokens
            for group in chosen
            for view in model.views(group, {}, "")
        )
        return chosen if able else model.groups

    def _is_canary(self, group: FingerprintGroup, newest: FingerprintGroup | None) -> bool:
        if self.engine == NEWEST:
            return group is newest
        return group.engine.startswith(self.engine) or group.fingerprint.startswith(self.engine)
