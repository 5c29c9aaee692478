"""Updates the tables of the reference pages from the code: `python -m docs.tables`.

A table stands between the lines `<!-- table NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from docs.api_tables import endpoints_table, errors_table, wire_table
from docs.families_table import families_table
from docs.markdown import markdown_table
from kvferry.cli.options import flag
from kvferry.protocol.adapter_metrics import AdapterMetrics
from kvferry.protocol.common_settings import CommonSettings
from kvferry.protocol.epp_settings import EppSettings
from kvferry.protocol.model_metrics import ModelRegistry
from kvferry.protocol.node_settings import AdapterSettings
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.settings import RouterSettings, ServeSettings, WorkerSettings
from kvferry.protocol.speech_metrics import SpeechMetrics
from kvferry.protocol.worker_metrics import WorkerMetrics

REFERENCE = Path(__file__).resolve().parent / "reference"
_BLOCK = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def settings_table(cls: type[CommonSettings], *but: type[CommonSettings]) -> str:
    """Return a row for each field of `cls`, except hidden ones, the role, and those that a class in `but` shares."""
    known = {(field.name, field.default) for other in but for field in dataclasses.fields(other)}
    rows = [
        (f"`{flag(field.name)}`", _default(field.default), _help(field))
        for field in dataclasses.fields(cls)
        if not field.metadata["hidden"] and field.name != "role" and (field.name, field.default) not in known
    ]
    return markdown_table(("flag", "default", "meaning"), rows)


def metrics_table(registry: CollectorRegistry) -> str:
    """Return a row for each metric, under the name that Prometheus sees."""
    rows = []
    for metric in registry.collect():
        name = metric.name + ("_total" if metric.type == "counter" else "")
        rows.append((f"`{name}`", metric.type, metric.documentation))
    return markdown_table(("metric", "type", "meaning"), rows)


def _of_adapter() -> ModelRegistry:
    registry = ModelRegistry()
    AdapterMetrics(registry)
    return registry


def _of_speech() -> ModelRegistry:
    registry = ModelRegistry()
    SpeechMetrics(registry)
    return registry


def tables() -> dict[str, str]:
    """Return all tables by name."""
    return {
        "common": settings_table(CommonSettings),
        "router": settings_table(RouterSettings, CommonSettings),
        "worker": settings_table(WorkerSettings, CommonSettings),
        "epp": settings_table(EppSettings, CommonSettings, RouterSettings),
        "adapter": settings_table(AdapterSettings, CommonSettings),
        "serve": settings_table(ServeSettings, CommonSettings, RouterSettings, WorkerSettings),
        "router_metrics": metrics_table(RouterMetrics().registry),
        "worker_metrics": metrics_table(WorkerMetrics("decode").registry),
        "speech_metrics": metrics_table(_of_speech()),
        "adapter_metrics": metrics_table(_of_adapter()),
        "endpoints": endpoints_table(),
        "errors": errors_table(),
        "wire": wire_table(),
        "families": families_table(),
    }


def update_tables(text: str) -> str:
    """Return the text with every table updated. Raises KeyError for an unknown table."""
    made = tables()
    return _BLOCK.sub(lambda found: f"{found[1]}{made[found[2]]}{found[3]}", text)


def _help(field: dataclasses.Field[object]) -> str:
    choices = field.metadata["choices"]
    return str(field.metadata["help"]) + (f" ({', '.join(choices)})" if choices else "")


def _default(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        value = " ".join(value)
    return f"`{value}`" if value != "" else ""


if __name__ == "__main__":
    for page in sorted(REFERENCE.glob("*.md")):
        page.write_text(update_tables(page.read_text()))
