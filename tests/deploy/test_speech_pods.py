"""The chart's example of a Whisper pool and the overlays' component: decode nodes alone, of the image with FFmpeg."""

from __future__ import annotations

import json

import pytest

from tests.deploy.binaries import ROOT
from tests.deploy.charts import chart
from tests.deploy.manifests import OVERLAYS, of_kind, pod_specs, render_within
from tests.deploy.test_pools import settings

PREFILL, DECODE = "kvferry-speech-prefill", "kvferry-speech-decode"


def test_a_whisper_pool_has_decode_nodes_of_the_image_with_ffmpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = chart(examples=("speech",))
    bake = json.loads((ROOT / "deploy/docker/bake.json").read_text())["target"]["worker-speech"]
    suffix = bake["tags"][0].rpartition("}")[2]
    images = {name: spec["containers"][0]["image"] for name, spec in pod_specs(objects).items()}
    assert {name for name, image in images.items() if image.endswith(suffix)} == {PREFILL, DECODE}
    deployments = of_kind(objects, "Deployment")
    assert deployments[PREFILL]["spec"]["replicas"] == 0
    node, router = (settings(objects, name, monkeypatch) for name in (DECODE, "kvferry-router"))
    assert (node["model"], node["max_num_seqs"]) == ("/models/whisper-base", 16)
    assert router["served_model_name"] == ("chat", "whisper-base")
    assert (router["max_body_mib"], router["request_timeout"]) == (128, 3600)


@pytest.mark.parametrize("kind", ["hpa", "keda"])
def test_no_autoscaler_starts_a_prefill_node_of_whisper(kind: str) -> None:
    scaling = {"kind": kind, "prefill": {"enabled": True}, "decode": {"enabled": True}}
    objects = chart(examples=("speech",), autoscaling=scaling)
    scalers = of_kind(objects, "ScaledObject" if kind == "keda" else "HorizontalPodAutoscaler")
    assert DECODE in scalers
    assert PREFILL not in scalers
    assert of_kind(objects, "Deployment")[PREFILL]["spec"]["replicas"] == 0


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_component_makes_an_overlay_transcribe(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    objects, example = render_within(overlay, "speech"), chart(examples=("speech",))
    assert not [item for item in objects if item["metadata"]["name"] == "kvferry-prefill"]
    node, router = (settings(objects, name, monkeypatch) for name in ("kvferry-decode", "kvferry-router"))
    charts = settings(example, "kvferry-router", monkeypatch)
    assert node["max_num_seqs"] == settings(example, DECODE, monkeypatch)["max_num_seqs"]
    assert [router[name] for name in ("max_body_mib", "request_timeout")] == [
        charts[name] for name in ("max_body_mib", "request_timeout")
    ]
    ours, theirs = (pod_specs(each)["kvferry-router"] for each in (objects, example))
    for spec in (ours, theirs):
        assert spec["terminationGracePeriodSeconds"] >= 5 + router["request_timeout"] + 15
    assert ours["containers"][0]["resources"] == theirs["containers"][0]["resources"]
