"""Parts of an endpoint picker that all its requests use: models, pickers, tenants, limits and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.endpoint_picker.picker import Picker
from kvferry.protocol.epp_settings import EppSettings
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.router.api.bodies.reader import BodyReader
from kvferry.router.api.inference_route import InflightLimit
from kvferry.router.api.served_models import ServedModels, pool_of
from kvferry.router.dispatch.cluster import RouterCluster
from kvferry.router.tenants.tenant_registry import TenantRegistry
from kvferry.router.text.text_model import TextModel


@dataclass(frozen=True, slots=True)
class Services:
    """Models, their pickers by the model's first name, tenants, limits and metrics."""

    settings: EppSettings
    models: ServedModels
    pickers: dict[str, Picker]
    tenant_registry: TenantRegistry
    metrics: RouterMetrics
    limit: InflightLimit
    reader: BodyReader

    @classmethod
    def of(
        cls,
        settings: EppSettings,
        texts: list[TextModel],
        nodes: RouterCluster,
        metrics: RouterMetrics,
        tenant_registry: TenantRegistry,
    ) -> Services:
        """Build the services for these models and the nodes that `nodes` tracks."""
        clusters = [nodes.pool(text.called) for text in texts]
        models = ServedModels(
            *(
                pool_of(text, cluster, metrics, settings, tenant_registry)
                for text, cluster in zip(texts, clusters, strict=True)
            )
        )
        pickers = {
            text.name: Picker(cluster, metrics, settings.fallback_endpoints)
            for text, cluster in zip(texts, clusters, strict=True)
        }
        limit, reader = InflightLimit(settings.max_inflight), BodyReader(settings.max_body_mib * 2**20)
        return cls(settings, models, pickers, tenant_registry, metrics, limit, reader)

    def trouble(self) -> str:
        """Return why this process accepts no requests; empty if it does."""
        return self.models.trouble
