"""All nodes as the router sees them: implements `router.journey.spec.Cluster`."""

from __future__ import annotations

import secrets

from protocol.metrics import RouterMetrics
from router.journey.attempt import Errands
from router.journey.fleet import BlockLookup, Fleet
from router.journey.journey import RouterJourney
from router.journey.spec import ClusterInfo, RequestSpec
from router.nodes.client import NodeClient
from router.nodes.table import NodeSource, NodeTable
from router.nodes.token_streams import TokenStreams

ERRANDS_S = 1.0
"""How long closing waits for cancels still under way."""


class RouterCluster:
    """Joins node table, token streams, index and client. `await open()` in the loop that will serve, `await close()`
    when every journey has ended (or `async with`). Source and index stay the caller's to close.

    local_tokens   see RouterSettings.local_prefill_tokens
    patience_s     how long a request that already began waits for a node when none can take it
    """

    def __init__(
        self,
        source: NodeSource,
        index: BlockLookup,
        metrics: RouterMetrics,
        *,
        local_tokens: int = 0,
        patience_s: float = 15.0,
        nodes: NodeTable | None = None,
        client: NodeClient | None = None,
    ) -> None:
        client = client or NodeClient(f"router-{secrets.token_hex(6)}")
        self._nodes = nodes or NodeTable(source, metrics)
        self.fleet = Fleet(
            router_id=client.router_id,
            nodes=self._nodes,
            streams=TokenStreams(client),
            client=client,
            index=index,
            metrics=metrics,
            errands=Errands(),
            local_tokens=local_tokens,
            patience_s=patience_s,
        )
        self._info: ClusterInfo | None = None
        self._nodes.listen(self._follow)

    async def open(self) -> None:
        """Read the registry once and begin to follow it; token streams open in the background. Never fails: without
        nodes or registry the cluster is simply not ready."""
        await self._nodes.start()

    async def close(self) -> None:
        await self._nodes.stop()
        await self.fleet.errands.finish(ERRANDS_S)
        await self.fleet.streams.close()
        await self.fleet.client.aclose()

    async def __aenter__(self) -> RouterCluster:
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def info(self) -> ClusterInfo | None:
        return self._info

    def ready(self) -> dict[str, int]:
        return {"prefill": len(self.fleet.prefills()), "decode": len(self.fleet.decodes())}

    def start(self, spec: RequestSpec) -> RouterJourney:
        """The work begins with the first iteration; what is refused here is what no node could take now."""
        journey = RouterJourney(spec, self.fleet)
        self.fleet.place(journey.demand(), {})
        return journey

    def _follow(self) -> None:
        """The nodes changed: hold a stream to every decode node, and describe the present group."""
        self.fleet.streams.keep(lease for lease in self._nodes.known() if lease.role == "decode")
        if group := self._nodes.group():
            self._info = ClusterInfo(
                model=group[0].model,
                max_model_len=min(lease.max_model_len for lease in group),
                block_size=group[0].block_size,
                fingerprint=group[0].fingerprint,
            )
