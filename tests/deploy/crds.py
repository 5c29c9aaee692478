"""Schemas of objects that no package has: the fields that the chart sets, as their projects describe them, and nothing
else. KVFERRY_TEST_CRDS may name a folder with the projects' own CRDs (YAML); objects are then held against them, too.

Described after sigs.k8s.io/lws v0.9, the inference extension of the Gateway API v1, and KServe's v1alpha2. Templates of
pods are held against Kubernetes itself.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.deploy.kubernetes_schemas import check_object
from tests.deploy.manifests import Manifest

FOLDER = "KVFERRY_TEST_CRDS"
GROUPS = (
    "leaderworkerset.x-k8s.io",
    "disaggregatedset.x-k8s.io",
    "inference.networking.k8s.io",
    "serving.kserve.io",
)


def fields(*required: str, **known: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": known, "required": list(required)}


COUNT = {"type": "integer", "minimum": 0}
SHARE = {"type": ["integer", "string"]}
PORT = fields("number", number={"type": "integer", "minimum": 1, "maximum": 65535})
NAMES = {"type": "object", "additionalProperties": {"type": "string"}}
SURGE = fields(maxSurge=SHARE, maxUnavailable=SHARE)
POD = {"type": "object"}
GROUP = fields(
    "leaderWorkerTemplate",
    replicas=COUNT,
    rolloutStrategy=fields(type={"const": "RollingUpdate"}, rollingUpdateConfiguration=SURGE),
    leaderWorkerTemplate=fields(
        "workerTemplate",
        size={"type": "integer", "minimum": 1},
        restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
        workerTemplate=fields("spec", metadata=POD, spec=POD),
    ),
)
ROLE = fields(
    "name", "spec", name={"type": "string"}, spec=GROUP, scaling=fields(mode={"enum": ["Static", "External"]})
)
POOL = fields(
    "selector",
    "targetPorts",
    "endpointPickerRef",
    selector=fields("matchLabels", matchLabels=NAMES),
    targetPorts={"type": "array", "items": PORT, "minItems": 1},
    endpointPickerRef=fields(
        "name", name={"type": "string", "minLength": 1}, port=PORT, failureMode={"enum": ["FailOpen", "FailClose"]}
    ),
)
WORKLOAD = {"replicas": COUNT, "rolloutStrategy": SURGE, "labels": NAMES, "annotations": NAMES, "template": POD}
ROUTE = fields(parentRefs={"type": "array"}, rules={"type": "array", "items": {"type": "object"}})
SERVICE = fields(
    **WORKLOAD,
    prefill=fields(**WORKLOAD),
    storageInitializer=fields(enabled={"type": "boolean"}),
    router=fields(route=fields(http=fields(spec=ROUTE))),
)
SPECS = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): GROUP,
    ("disaggregatedset.x-k8s.io/v1", "DisaggregatedSet"): fields(
        "roles", roles={"type": "array", "items": ROLE, "minItems": 2}
    ),
    ("inference.networking.k8s.io/v1", "InferencePool"): POOL,
    ("serving.kserve.io/v1alpha2", "LLMInferenceServiceConfig"): SERVICE,
}


def check(item: Manifest, version: str = "1.36") -> None:
    """Raises ValidationError."""
    kind = (item["apiVersion"], item["kind"])
    jsonschema.validate(item["spec"], SPECS[kind])
    for template in templates(item["spec"]):
        labels = {"matchLabels": template["metadata"]["labels"]}
        frame = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}}
        held = {**frame, "spec": {"selector": labels, "template": template}}
        check_object(held, version)
    if kind in given():
        jsonschema.validate(item, given()[kind])


def templates(value: Any) -> Iterator[Manifest]:
    """Templates of pods within an object, KServe's as others have them."""
    if isinstance(value, list):
        for each in value:
            yield from templates(each)
    elif isinstance(value, dict):
        if "workerTemplate" in value:
            yield value["workerTemplate"]
        elif "template" in value:
            about = {name: value[name] for name in ("labels", "annotations") if name in value}
            yield {"metadata": about, "spec": value["template"]}
        for each in value.values():
            yield from templates(each)


@functools.cache
def given() -> dict[tuple[str, str], dict[str, Any]]:
    """Strict schemas of the projects' own CRDs, by version and kind."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted(Path(os.environ[FOLDER]).glob("*.yaml")) if FOLDER in os.environ else ():
        crd = yaml.load(path.read_text(), yaml.CSafeLoader)["spec"]
        for each in crd["versions"]:
            key = (f"{crd['group']}/{each['name']}", crd["names"]["kind"])
            found[key] = {**closed(each["schema"]["openAPIV3Schema"]), "additionalProperties": True}
    return found


def closed(schema: Any) -> Any:
    """As the API server with strict fields takes it: no unknown ones; numbers or text where either will do."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: closed(each) for name, each in schema.items() if name != "default"}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not open_ended:
        made["additionalProperties"] = False
    return made
