"""Encode nodes in the chart: none unless a pool has replicas of them, and then all that other nodes have."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.charts import chart
from tests.deploy.manifests import Manifest, Objects, of_kind, render_within
from tests.deploy.test_pools import POOLS

NAME = "kvferry-encode"


def encode(**values: Any) -> Objects:
    return chart(**{"encode": {"replicas": 2}, **values})


def named(objects: Objects) -> list[Manifest]:
    return [item for item in objects if item["metadata"]["name"] == NAME]


def allowed(objects: Objects) -> tuple[list[str], set[int]]:
    """Components that the workers' policy is for, and the ports that it opens."""
    policy = of_kind(objects, "NetworkPolicy")["kvferry-workers"]["spec"]
    ports = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    return policy["podSelector"]["matchExpressions"][0]["values"], ports


def test_there_are_none_by_default() -> None:
    assert named(chart()) == []
    assert allowed(chart()) == (["prefill", "decode"], {9000, 9001, 9100, 9101})


def test_they_are_reached_and_scraped_as_other_nodes_are() -> None:
    objects = encode(monitoring={"podMonitor": {"enabled": True}})
    assert {item["kind"] for item in named(objects)} == {"Deployment", "Service", "PodDisruptionBudget"}
    deployment = of_kind(objects, "Deployment")[NAME]["spec"]
    (container,) = deployment["template"]["spec"]["containers"]
    assert (deployment["replicas"], container["args"][0]) == (2, "encode")
    assert [port["containerPort"] for port in container["ports"]] == [9002, 9102]
    assert allowed(objects) == (["prefill", "decode", "encode"], {9000, 9001, 9002, 9100, 9101, 9102})
    (monitor,) = of_kind(objects, "PodMonitor").values()
    assert "encode" in monitor["spec"]["selector"]["matchExpressions"][0]["values"]


@pytest.mark.parametrize("kind", ["LeaderWorkerSet", "DisaggregatedSet", "LLMInferenceService"])
def test_sets_of_prefill_and_decode_nodes_leave_them_apart(kind: str) -> None:
    made = [item["kind"] for item in named(encode(worker={"workload": kind}))]
    assert ("LeaderWorkerSet" if kind == "LeaderWorkerSet" else "Deployment") in made
    for item in of_kind(encode(worker={"workload": kind}), "DisaggregatedSet").values():
        assert [role["name"] for role in item["spec"]["roles"]] == ["decode", "prefill"]


def test_one_pool_may_have_them() -> None:
    first, *others = POOLS["pools"]
    objects = chart(**{**POOLS, "pools": [{**first, "encode": {"replicas": 1}}, *others]})
    assert [name for name in of_kind(objects, "Deployment") if name.endswith("-encode")] == [
        f"kvferry-{first['name']}-encode"
    ]
    assert "encode" in allowed(objects)[0]


def test_the_component_gives_an_overlay_what_the_chart_gives_a_release() -> None:
    objects = render_within("cpu", "encode")
    assert {item["kind"] for item in named(objects)} == {"Deployment", "Service", "PodDisruptionBudget"}
    theirs, ours = (of_kind(each, "Deployment")[NAME]["spec"]["template"]["spec"] for each in (encode(), objects))
    assert ours["containers"][0]["args"] == theirs["containers"][0]["args"]
    assert ours["containers"][0]["ports"] == theirs["containers"][0]["ports"]
    assert allowed(objects) == allowed(encode())
    prefill = of_kind(objects, "Deployment")["kvferry-prefill"]["spec"]["template"]["spec"]
    assert ours["containers"][0]["envFrom"] == prefill["containers"][0]["envFrom"], "the settings of its model"
