"""Ways of installing kvferry, of which each is checked alike: overlays, and the chart with values of several kinds. All
are called kvferry, in the namespace kvferry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.deploy.charts import chart
from tests.deploy.manifests import Objects, render

SIDECAR = {
    "name": "shipper",
    "image": "example.org/shipper:1",
    "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"cpu": "10m", "memory": "16Mi"}},
    "securityContext": {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    },
    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
}
CLAIM = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "42Gi"}}}
EVERYWHERE: dict[str, Any] = {
    "extraEnv": [{"name": "TZ", "value": "UTC"}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    "sidecars": [SIDECAR],
    "initContainers": [{**SIDECAR, "name": "before", "restartPolicy": "Always"}],
    "podLabels": {"team": "chat"},
    "podAnnotations": {"example.org/about": "chat"},
    "nodeSelector": {"pool": "llm"},
    "tolerations": [{"key": "llm", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "production",
    "runtimeClassName": "nvidia",
}
FULL: dict[str, Any] = {
    "commonLabels": {"cost": "llm"},
    "images": {"registry": "registry.example.org/llm", "pullSecrets": [{"name": "pull"}], "pullPolicy": "Always"},
    "serviceAccount": {"annotations": {"example.org/role": "none"}},
    "apiKeys": {"existingSecret": "kvferry-keys", "operatorSecret": {"name": "kvferry-operator"}},
    "network": {"host": "::", "ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv6", "IPv4"]},
    "networkPolicy": {
        "clients": [{"podSelector": {}}],
        "egress": {"enabled": True, "extra": [{"ports": [{"port": 443, "protocol": "TCP"}]}]},
    },
    "router": {**EVERYWHERE, "tls": {"secretName": "kvferry-tls"}, "queueTimeout": 30, "extraArgs": ["--batch-rows=4"]},
    "tracing": {"endpoint": "http://collector.monitoring:4318"},
    "worker": {
        "nearEachOther": "kubernetes.io/hostname",
        "rdma": {"resource": "rdma/hca"},
        "kvDisk": {"gib": 40, "volume": {"ephemeral": {"volumeClaimTemplate": {"spec": CLAIM}}}},
    },
    "prefill": {**EVERYWHERE, "extraArgs": ["--threads=4"]},
    "decode": {**EVERYWHERE, "affinity": {}, "disruptionBudget": {}},
    "redis": {**EVERYWHERE, "tls": {"secretName": "kvferry-redis-tls"}, "existingSecret": "kvferry-redis-own"},
    "autoscaling": {"kind": "none"},
    "monitoring": {"podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "gate"}], "annotations": {"example.org/a": "b"}},
}
"""What can be switched on, all at once."""

ENGINES: dict[str, Any] = {
    "model": {"name": "/models/model", "servedName": "org/chat,chat", "volume": {"enabled": True}},
    "autoscaling": {"kind": "none"},
    "engines": [
        {"name": "vllm", "image": "vllm/vllm-openai:v0.32.0", "nixl": {"enabled": True}, "replicas": 2},
        {
            **EVERYWHERE,
            "name": "sglang",
            "engine": "sglang",
            "image": "lmsysorg/sglang:v0.5.23",
            "blockSize": 32,
            "tensorParallelSize": 2,
            "gpus": 2,
            "gpuResource": "example.org/gpu",
            "revision": "r2",
            "acceptInexact": True,
            "args": ["--mem-fraction-static", "0.8"],
            "adapter": {"extraArgs": ["--log-format=json"]},
        },
        {
            "name": "llamacpp",
            "engine": "llamacpp",
            "image": "ghcr.io/ggml-org/llama.cpp:server-b7000",
            "model": "/models/model/model.gguf",
            "port": 8080,
            "gpus": 0,
            "drainTimeout": 90,
        },
    ],
}
"""Engines of all kinds beside kvferry's own workers."""

INSTALLATIONS: dict[str, Callable[[], Objects]] = {
    "cpu": lambda: render("cpu"),
    "gpu": lambda: render("gpu"),
    "gpu-rdma": lambda: render("gpu", "rdma"),
    "components": lambda: render("gpu", "api-keys", "operator-key", "external-redis"),
    "chart-production": lambda: chart(examples=("gpu", "production")),
    "chart-rdma": lambda: chart(examples=("gpu", "rdma")),
    "chart-full": lambda: chart(**FULL),
    "chart-engines": lambda: chart(**ENGINES),
}
UNRESTRICTED = ("gpu-rdma", "chart-rdma", "chart-full")
"""RDMA pins memory, which needs a capability."""
CUSTOM = ("keda.sh", "gateway.networking.k8s.io", "monitoring.coreos.com")
"""Groups of objects that Kubernetes itself does not know."""


def own(objects: Objects) -> Objects:
    """Objects that Kubernetes itself knows."""
    return tuple(item for item in objects if item["apiVersion"].partition("/")[0] not in CUSTOM)
