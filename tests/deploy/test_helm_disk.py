"""The chart's volume for blocks on disk."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.charts import chart, refusal
from tests.deploy.manifests import Manifest, of_kind


def pods(**disk: Any) -> dict[str, Manifest]:
    """Of both roles."""
    made = of_kind(chart(worker={"disk": {"enabled": True, **disk}}), "Deployment")
    assert "kv" not in {each["name"] for each in made["kvferry-router"]["spec"]["template"]["spec"]["volumes"]}
    return {role: made[f"kvferry-{role}"]["spec"]["template"]["spec"] for role in ("prefill", "decode")}


def volume(pod: Manifest) -> Manifest:
    (found,) = [each for each in pod["volumes"] if each["name"] == "kv"]
    return {name: value for name, value in found.items() if name != "name"}


@pytest.mark.parametrize(
    ("disk", "expected"),
    [
        ({}, {"emptyDir": {"sizeLimit": "12Gi"}}),
        ({"gib": 0.5}, {"emptyDir": {"sizeLimit": "2Gi"}}),
        ({"gib": 200}, {"emptyDir": {"sizeLimit": "221Gi"}}),
        ({"size": "1Ti"}, {"emptyDir": {"sizeLimit": "1Ti"}}),
        ({"volume": "hostPath", "hostPath": "/mnt/nvme"}, {"hostPath": {"path": "/mnt/nvme", "type": "Directory"}}),
        ({"volume": "existingClaim", "existingClaim": "kv"}, {"persistentVolumeClaim": {"claimName": "kv"}}),
    ],
)
def test_workers_keep_blocks_on_a_volume(disk: dict[str, Any], expected: dict[str, Any]) -> None:
    for pod in pods(**disk).values():
        assert volume(pod) == expected
        (container,) = pod["containers"]
        assert {"name": "kv", "mountPath": "/kv"} in container["volumeMounts"]
        assert "--kv-disk-path=/kv" in container["args"]
        assert f"--kv-disk-gib={disk.get('gib', 10)}" in container["args"]


def test_each_pod_may_have_a_claim_of_its_own() -> None:
    for pod in pods(volume="ephemeral", storageClass="local-nvme", gib=90, mountPath="/cache").values():
        spec = volume(pod)["ephemeral"]["volumeClaimTemplate"]["spec"]
        assert spec == {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "local-nvme",
            "resources": {"requests": {"storage": "100Gi"}},
        }
        assert {"name": "kv", "mountPath": "/cache"} in pod["containers"][0]["volumeMounts"]
    (template,) = {str(volume(pod)["ephemeral"]) for pod in pods(volume="ephemeral").values()}
    assert "storageClassName" not in template


def test_by_default_there_is_none() -> None:
    for made in of_kind(chart(), "Deployment").values():
        spec = made["spec"]["template"]["spec"]
        assert "kv" not in {each["name"] for each in spec.get("volumes", [])}
        assert not [arg for arg in spec["containers"][0].get("args", []) if "kv-disk" in arg]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"volume": "hostPath"}, "worker.disk.hostPath"),
        ({"volume": "existingClaim"}, "worker.disk.existingClaim"),
        ({"volume": "nfs"}, "volume"),
        ({"gib": 0}, "gib"),
        ({"size": "ten"}, "size"),
    ],
)
def test_wrong_values_are_told_by_name(values: dict[str, Any], told: str) -> None:
    assert told in refusal(worker={"disk": {"enabled": True, **values}})


def test_pools_on_a_gpu_are_refused() -> None:
    assert "worker.disk.enabled" in refusal(worker={"device": "cuda", "disk": {"enabled": True}})
