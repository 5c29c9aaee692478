"""The README's tables of settings and metrics, made from the code: `python -m docs.tables README.md` renews them.

A table stands between the lines `<!-- table NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry

from cli.options import flag
from protocol.common_settings import CommonSettings
from protocol.metrics import RouterMetrics
from protocol.settings import RouterSettings, ServeSettings, WorkerSettings
from protocol.worker_metrics import WorkerMetrics

_BLOCK = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def settings_table(cls: type[CommonSettings], *but: type[CommonSettings]) -> str:
    """A row per field of `cls`, without hidden ones, the role, and those that a class in `but` has just so."""
    known = {(field.name, field.default) for other in but for field in dataclasses.fields(other)}
    rows = [
        (f"`{flag(field.name)}`", _default(field.default), _help(field))
        for field in dataclasses.fields(cls)
        if not field.metadata["hidden"] and field.name != "role" and (field.name, field.default) not in known
    ]
    return _table(("flag", "default", "meaning"), rows)


def metrics_table(registry: CollectorRegistry) -> str:
    """A row per metric as Prometheus names it."""
    rows = []
    for metric in registry.collect():
        name = metric.name + ("_total" if metric.type == "counter" else "")
        rows.append((f"`{name}`", metric.type, metric.documentation))
    return _table(("metric", "type", "meaning"), rows)


def tables() -> dict[str, str]:
    """All tables by name."""
    return {
        "common": settings_table(CommonSettings),
        "router": settings_table(RouterSettings, CommonSettings),
        "worker": settings_table(WorkerSettings, CommonSettings),
        "serve": settings_table(ServeSettings, CommonSettings, RouterSettings, WorkerSettings),
        "router_metrics": metrics_table(RouterMetrics().registry),
        "worker_metrics": metrics_table(WorkerMetrics("decode").registry),
    }


def renew(text: str) -> str:
    """The text with every table made anew. Raises KeyError for a name that is none."""
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


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(renew(Path(name).read_text()))
