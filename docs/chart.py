"""What the Helm chart holds of other files, and its table of values: `python -m docs.chart` renews them."""

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
"""Files under deploy/ that helm cannot reach there, by pattern, and in which folder of the chart's files they are."""
_TABLE = re.compile(r"(<!-- values -->\n).*?(<!-- end -->)", re.DOTALL)
Json = Mapping[str, Any]


def copies() -> Iterator[tuple[Path, Path]]:
    """Each file with its copy."""
    for pattern, folder in COPIES.items():
        for source in sorted(DEPLOY.glob(pattern)):
            yield source, CHART / "files" / folder / source.name


def table() -> str:
    """A row per value: its name, its default, what it means. What all pods may have is told once."""
    parts = json.loads((CHART / "values.schema.json").read_text())["properties"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    common = parts["decode"]["properties"].keys() & parts["redis"]["properties"].keys()
    rows = [row for name, part in parts.items() for row in _rows(name, part, values.get(name), common, "")]
    rows += [
        _row(f"POD.{name}", part, None, "") for name, part in parts["decode"]["properties"].items() if name in common
    ]
    return "\n".join(("| value | default | meaning |", "| --- | --- | --- |", *rows)) + "\n"


def renew(text: str) -> str:
    return _TABLE.sub(lambda found: f"{found[1]}{table()}{found[2]}", text)


def _rows(name: str, schema: Json, value: Any, common: AbstractSet[str], about: str) -> Iterator[str]:
    """Of a value, or of those inside it. about: what holds it is."""
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
    README.write_text(renew(README.read_text()))


if __name__ == "__main__":
    main()
