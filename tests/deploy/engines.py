"""Pods of engines as manifests have them: the engine's command line, and what its adapter makes of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from kvferry.cli.main import kvferry
from tests.deploy.manifests import Manifest, Objects, container_command, of_kind, pod_specs

PREFIX = "kvferry-engine-"


@dataclass(frozen=True)
class EnginePod:
    """One group's pod. adapter: the parameters that `kvferry adapt` reads from its flags and variables."""

    name: str
    spec: Manifest
    engine: Manifest
    adapter: dict[str, Any]

    @property
    def argv(self) -> list[str]:
        """The engine's whole command line."""
        return [*self.engine["command"], *self.engine["args"]]

    def after(self, flag: str) -> str:
        """The value of an engine's flag, which must be there once."""
        assert self.argv.count(flag) == 1, (flag, self.argv)
        return self.argv[self.argv.index(flag) + 1]

    @property
    def events(self) -> dict[str, Any]:
        """The configuration of its KV events."""
        found: dict[str, Any] = json.loads(self.after("--kv-events-config"))
        return found

    def volumes_at(self, container: Manifest, path: str) -> list[str]:
        return [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == path]


def engine_pods(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> dict[str, EnginePod]:
    """All of them by the names of their groups."""
    made = {**of_kind(objects, "Deployment"), **of_kind(objects, "StatefulSet")}
    return {
        item["metadata"]["labels"]["kvferry/engine"]: _engine_pod(objects, name, monkeypatch)
        for name, item in made.items()
        if item["metadata"]["labels"].get("app.kubernetes.io/component") == "engine"
    }


def _engine_pod(objects: Objects, name: str, monkeypatch: pytest.MonkeyPatch) -> EnginePod:
    spec = pod_specs(objects)[name]
    argv, env = container_command(objects, name, {"metadata.name": "pod-7", "status.podIP": "10.1.2.3"})
    assert argv[:2] == ["kvferry", "adapt"]
    with monkeypatch.context() as patch:
        for key, value in env.items():
            patch.setenv(key, value)
        adapter = kvferry.commands["adapt"].make_context("adapt", argv[2:]).params
    (engine,) = [each for each in spec["initContainers"] if each["name"] == "engine"]
    return EnginePod(name, spec, engine, adapter)
