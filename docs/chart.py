"""Updates the Helm chart's copies of other files and its table of values: `python -m docs.chart`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
CHART = DEPLOY / "helm" / "kvferry"
README = CHART / "README.md"
COPIES = {
    "k8s/base/autoscaling.yaml": "",
    "k8s/components/keda/scaledobjects.yaml": "",
    "k8s/overlays/gpu/model.py": "",
    "k8s/overlays/gpu/objects.py": "",
    "monitoring/alerts.yml": "",
    "monitoring/dashboards/*.json": "dashboards",
}
"""Files under deploy/ that helm cannot reach, by pattern, with the chart's folder that holds their copies."""
_TABLE = re.compile(r"(<!-- values -->\n).*?(<!-- end -->)", re.DOTALL)
Json = Mapping[str, Any]


def copies() -> Iterator[tuple[Path, Path]]:
    """Yield each file with its copy."""
    for pattern, folder in COPIES.items():
        for source in sorted(DEPLOY.glob(pattern)):
            yield source, CHART / "files" / folder / source.name


def table() -> str:
    """Return a row per value: name, default, meaning. Values that all pods share are listed once."""
    parts = json.loads((CHART / "values.schema.json").read_text())["properties"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    common = parts["decode"]["properties"].keys() & parts["redis"]["properties"].keys()
    rows = [row for name, part in parts.items() for row in _rows(name, part, values.get(name), common, "")]
    rows += [
        _row(f"POD.{name}", part, None, "") for name, part in parts["decode"]["properties"].items() if name in common
    ]
    return "\n".join(("| value | default | meaning |", "| --- | --- | --- |", *rows)) + "\n"


def update_table(text: str) -> str:
    return _TABLE.sub(lambda found: f"{found[1]}{table()}{found[2]}", text)


def _rows(name: str, schema: Json, value: Any, common: AbstractSet[str], about: str) -> Iterator[str]:
    """Yield the rows of a value, or of the values inside it. about: description of what holds it."""
    inner = schema.get("properties")
    if not inner or ("description" in schema and schema.get("maxProperties")):
        yield _row(name, schema, value, about)
        return
    for each, part in inner.items():
        if each not in common or each in (value or {}):
            inside = (value or {}).get(each)
            yield from _rows(f"{name}.{each}", part, inside, common, schema.get("description", ""))


def _row(name: str, schema: Json, value: Any, about: str) -> str:
    text = ": ".join(part for part in (about, schema.get("description", "")) if part)
    words = ", ".join(f"`{each}`" for each in schema.get("enum", ()) if each)
    meaning = "; ".join(part for part in (text, words) if part).replace("|", "\\|")
    shown = f"`{json.dumps(value, ensure_ascii=False)}`" if value or value in (0, False) else ""
    return f"| `{name}` | {shown} | {meaning} |"


def main() -> None:
    for source, target in copies():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    README.write_text(update_table(README.read_text()))


if __name__ == "__main__":
    main()
