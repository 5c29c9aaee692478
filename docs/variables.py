"""Template variables of the Grafana dashboards, and the selectors that apply them to every query."""

from __future__ import annotations

import functools
import re
from typing import Any

from kvferry.protocol.adapter_metrics import AdapterMetrics
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.worker_metrics import WorkerMetrics

Json = dict[str, Any]
ALL = {"selected": True, "text": ["All"], "value": ["$__all"]}


def _of_labels(name: str, label: str, query: str) -> Json:
    """Return a variable with the values of a label; by default it matches all, including series without the label."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": query, "refId": f"{name} values", "qryType": 1},
        "definition": query,
        "current": ALL,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "refresh": 2,
        "sort": 1,
        "hide": 0,
        "regex": "",
        "options": [],
    }


VARIABLES: list[Json] = [
    {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "refresh": 1,
        "regex": "",
        "options": [],
    },
    _of_labels("cluster", "Cluster", "label_values(kvferry_registry_up, cluster)"),
    _of_labels("namespace", "Namespace", 'label_values(kvferry_registry_up{cluster=~"$cluster"}, namespace)'),
    _of_labels(
        "model",
        "Model",
        'label_values(kvferry_prompt_tokens_total{cluster=~"$cluster", namespace=~"$namespace"}, model_name)',
    ),
]
_EVERYWHERE = ('cluster=~"$cluster"', 'namespace=~"$namespace"')
_OF_MODEL = 'model_name=~"$model"'
_SERIES = re.compile(r"\b(kvferry_\w+)(?:\{([^}]*)\})?")


def scoped(query: str) -> str:
    """Return the query limited to the chosen cluster, namespace and, where metrics have it, model."""

    def narrowed(found: re.Match[str]) -> str:
        own = (found[2],) if found[2] else ()
        model = (_OF_MODEL,) if found[1] in of_models() else ()
        return f"{found[1]}{{{', '.join((*own, *_EVERYWHERE, *model))}}}"

    return _SERIES.sub(narrowed, query)


@functools.cache
def of_models() -> frozenset[str]:
    """Return the names of samples with a model label."""
    router, node = RouterMetrics(), WorkerMetrics("decode")
    router.of("m")
    node.registry.model_name = "m"
    AdapterMetrics(node.registry).epoch.labels("any")
    registries = (router.registry, node.registry)
    samples = (sample for registry in registries for family in registry.collect() for sample in family.samples)
    return frozenset(sample.name for sample in samples if "model_name" in sample.labels)
