"""The chart: the same as the overlays with its own values, and what each switch does."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import yaml

from docs import chart as made_docs
from kvferry.cluster_state import redis_url
from kvferry.runtime import tracing
from tests.deploy.charts import CHART, EXAMPLES, chart, plain, refusal
from tests.deploy.installations import FULL
from tests.deploy.manifests import PROCESSES, Manifest, Objects, container_command, of_kind, pod_specs, render

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


@pytest.mark.parametrize(("overlay", "examples"), [("cpu", ()), ("gpu", ("gpu",))])
def test_the_chart_renders_what_the_overlay_is(overlay: str, examples: tuple[str, ...]) -> None:
    expected, found = plain(render(overlay)), plain(chart(examples=examples))
    assert found.keys() == expected.keys()
    for name, item in expected.items():
        assert found[name] == item, name


def test_the_chart_renders_what_the_overlay_with_rdma_is() -> None:
    expected, found = plain(render("gpu", "rdma")), plain(chart(examples=("gpu", "rdma")))
    assert found == expected


def test_a_difference_would_be_noticed() -> None:
    expected = plain(render("cpu"))
    cases: dict[str, dict[str, Any]] = {
        "Deployment kvferry-decode": {"decode": {"maxNumSeqs": 63}},
        "Deployment kvferry-redis": {"redis": {"resources": {"limits": {"cpu": "2"}}}},
        "NetworkPolicy kvferry-workers": {"networkPolicy": {"scrapers": []}},
        "Deployment kvferry-router": {"router": {"podAnnotations": {"a": "b"}}},
    }
    for other, values in cases.items():
        found = plain(chart(**values))
        assert [name for name in expected if found[name] != expected[name]] == [other]


def test_copies_and_table_are_fresh() -> None:
    for source, copy in made_docs.copies():
        assert copy.read_bytes() == source.read_bytes(), f"{copy.name}: run make docs"
        assert not copy.is_symlink()
    readme = made_docs.README.read_text()
    assert made_docs.update_table(readme) == readme, "run: make docs"
    assert readme.count("| `decode.maxNumSeqs` | `64` | --max-num-seqs |") == 1


def described(schema: Manifest, values: Any, name: str = "") -> None:
    """Every value is in the schema and says what it is; nothing else is let in."""
    assert schema["additionalProperties"] is False, name
    assert values.keys() <= schema["properties"].keys(), name
    for key, part in schema["properties"].items():
        if "properties" in part and not part.get("maxProperties"):
            described(part, values.get(key, {}), f"{name}{key}.")
        else:
            assert part.get("description"), f"{name}{key}"


def test_every_value_is_described_and_of_its_type() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    described(SCHEMA, VALUES)
    jsonschema.validate(VALUES, SCHEMA)
    for path in EXAMPLES.glob("*.yaml"):
        jsonschema.validate(yaml.safe_load(path.read_text()), SCHEMA)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"decod": {}}, "decod"),
        ({"decode": {"replica": 3}}, "replica"),
        ({"decode": {"replicas": "three"}}, "replicas"),
        ({"worker": {"ucxTransports": "rc"}}, "ucxTransports"),
        ({"autoscaling": {"kind": "vpa"}}, "kind"),
        ({"network": {"host": "127.0.0.1"}}, "host"),
        ({"prefill": {"resources": {"limits": {"cpu": "two"}}}}, "cpu"),
        ({"redis": {"enabled": False}}, "externalRedis.url"),
        ({"redis": {"enabled": False}, "externalRedis": {"url": "redis://a:b@c"}}, "password"),
        ({"redis": {"enabled": False}, "externalRedis": {"url": "redis://c/0?password=b"}}, "password"),
        ({"redis": {"enabled": False}, "externalRedis": {"url": "redis://c", "urlSecret": {"name": "s"}}}, "one of"),
        ({"model": {"fetch": {"enabled": True, "repository": "a/b"}}}, "model.volume.enabled"),
        ({"model": {"volume": {"enabled": True}}}, "/models"),
        ({"model": {"name": "Qwen/Qwen3-8B"}}, "model.fetch.repository"),
        ({"worker": {"kvHost": {"gib": 5}}}, "worker.kvCacheGib"),
        ({"worker": {"tensorParallelSize": 0}}, "tensorParallelSize"),
        ({"worker": {"expertParallel": True}}, "worker.tensorParallelSize"),
        ({"model": {"name": "/models/m", "volume": {"enabled": True}, "fetch": {"enabled": True}}}, "repository"),
        ({"autoscaling": {"decode": {"enabled": True, "min": 0}}}, "autoscaling.decode.min"),
        ({"autoscaling": {"decode": {"enabled": True, "min": 9, "max": 3}}}, "max 3"),
        ({"httpRoute": {"enabled": True}}, "parentRefs"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], told: str) -> None:
    assert told in refusal(**values)


def names_within(value: Any) -> set[str]:
    """Every text inside an object."""
    if isinstance(value, dict):
        return {text for each in value.items() for part in each for text in names_within(part)}
    if isinstance(value, list):
        return {text for each in value for text in names_within(each)}
    return {value} if isinstance(value, str) else set()


def test_two_releases_share_a_namespace() -> None:
    """Nothing of one is called or selected like the other's, and no pod of one mounts what is the other's."""
    one, other = chart("chat"), chart("code")
    keys = [{(item["kind"], item["metadata"]["name"]) for item in objects} for objects in (one, other)]
    assert not keys[0] & keys[1]
    assert not [text for text in names_within(list(one)) if text.startswith("code-")]
    for item in one:
        selector = item["spec"].get("selector") if "spec" in item else None
        if selector:
            found = selector.get("matchLabels", selector)
            assert found["app.kubernetes.io/instance"] == "chat"
    for policy in of_kind(one, "NetworkPolicy").values():
        for peer in names_of_pods(policy):
            assert peer["app.kubernetes.io/instance"] == "chat"


def names_of_pods(policy: Manifest) -> list[dict[str, str]]:
    rules = policy["spec"].get("ingress", []) + policy["spec"].get("egress", [])
    peers = [peer for rule in rules for peer in rule.get("from", []) + rule.get("to", [])]
    own = [policy["spec"]["podSelector"]["matchLabels"]]
    return own + [peer["podSelector"]["matchLabels"] for peer in peers if "podSelector" in peer]


def test_a_long_release_has_names_that_services_may_have() -> None:
    objects = chart("a-release-of-fifty-three-characters-which-is-the-most")
    assert max(len(name) for name in of_kind(objects, "Service")) <= 63
    assert len(of_kind(objects, "Deployment")) == 4


@pytest.mark.parametrize(
    ("values", "url"),
    [
        ({}, "redis://kvferry@kvferry-redis:6379/0"),
        (
            {"redis": {"tls": {"secretName": "tls"}}},
            "rediss://kvferry@kvferry-redis:6379/0?ssl_ca_certs=/run/kvferry/redis-ca/ca.crt",
        ),
        (
            {
                "redis": {"enabled": False},
                "externalRedis": {"url": "rediss://u@r:6380/2?client_name=x", "caSecret": {"name": "ca"}},
            },
            "rediss://u@r:6380/2?client_name=x&ssl_ca_certs=/run/kvferry/redis-ca/ca.crt",
        ),
    ],
)
def test_urls_of_redis(values: dict[str, Any], url: str) -> None:
    objects = chart(**values)
    data = of_kind(objects, "ConfigMap")["kvferry-cluster"]["data"]
    assert data["KVFERRY_REDIS_URL"] == url
    plain_url = url.replace("?ssl_ca_certs", "&ssl_ca_certs").partition("&ssl_ca_certs")[0]
    assert redis_url.read(plain_url).tls == url.startswith("rediss")
    shared = not values.get("redis", {}).get("enabled", True)
    assert data["KVFERRY_CLUSTER"] == ("kvferry.kvferry" if shared else "default")
    assert ("kvferry-redis" in of_kind(objects, "Deployment")) != shared


def test_a_url_in_a_secret_is_in_no_config_map() -> None:
    objects = chart(redis={"enabled": False}, externalRedis={"urlSecret": {"name": "mine", "key": "url"}})
    data = of_kind(objects, "ConfigMap")["kvferry-cluster"]["data"]
    assert not {"KVFERRY_REDIS_URL", "KVFERRY_REDIS_PASSWORD_FILE"} & data.keys()
    for name in PROCESSES:
        env = {each["name"]: each for each in pod_specs(objects)[name]["containers"][0]["env"]}
        assert env["KVFERRY_REDIS_URL"]["valueFrom"] == {"secretKeyRef": {"name": "mine", "key": "url"}}


def test_secrets_are_made_where_none_is_named() -> None:
    made = of_kind(chart(), "Secret")
    assert made.keys() == {"kvferry-cluster-secret", "kvferry-redis"}
    assert all(item["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for item in made.values())
    named: Objects = chart(cluster={"secret": {"existingSecret": "a"}}, redis={"existingSecret": "b"})
    assert not of_kind(named, "Secret")


def test_settings_roll_the_pods_that_read_them() -> None:
    before, after = chart(), chart(worker={"blockSize": 32})
    for name in PROCESSES:
        stamps = [
            of_kind(each, "Deployment")[name]["spec"]["template"]["metadata"]["annotations"]["checksum/settings"]
            for each in (before, after)
        ]
        assert stamps[0] != stamps[1]


def test_another_version_of_the_chart_alone_rolls_no_pod() -> None:
    for item in of_kind(chart(**FULL), "Deployment").values():
        labels = item["spec"]["template"]["metadata"]["labels"]
        assert labels["cost"] == "llm"
        assert not {"helm.sh/chart", "app.kubernetes.io/version", "app.kubernetes.io/managed-by"} & labels.keys()


@pytest.mark.parametrize(
    ("values", "store", "data"),
    [
        ({}, "redis", False),
        ({"router": {"replicas": 1}}, "redis", False),
        ({"router": {"replicas": 1}, "autoscaling": {"kind": "none"}}, "disk", False),
        ({"router": {"filesVolume": {"existingClaim": "shared"}}}, "disk", True),
        ({"router": {"filesStore": "disk"}}, "disk", False),
    ],
)
def test_several_routers_share_files(values: dict[str, Any], store: str, data: bool) -> None:
    """An autoscaler may start a second one. Redis evicts nothing if it holds files."""
    objects = chart(**values)
    router, redis = (pod_specs(objects)[f"kvferry-{name}"] for name in ("router", "redis"))
    words = router["containers"][0]["args"]
    assert f"--files-store={store}" in words
    assert ("--data-dir=/data" in words) == data
    claims = [each["persistentVolumeClaim"] for each in router["volumes"] if each["name"] == "files"]
    assert claims == ([{"claimName": "shared"}] if data else [])
    assert ([each["mountPath"] for each in router["containers"][0]["volumeMounts"] if each["name"] == "files"]) == (
        ["/data"] if data else []
    )
    options = redis["containers"][0]["args"]
    assert options[options.index("--maxmemory-policy") + 1] == ("noeviction" if store == "redis" else "allkeys-lru")
    assert options[options.index("--appendonly") + 1] == ("yes" if store == "redis" else "no")


def test_blocks_on_disk_have_a_volume_that_fits_them() -> None:
    """Of workers alone; without the value there is none."""
    for values, volume in (
        ({"gib": 2.5}, {"emptyDir": {"sizeLimit": "4Gi"}}),
        ({"gib": 2, "volume": {"hostPath": {"path": "/kv"}}}, {"hostPath": {"path": "/kv"}}),
        ({"volume": {"emptyDir": {}}}, None),
    ):
        objects = chart(worker={"kvDisk": values})
        for name, spec in pod_specs(objects).items():
            found = [each for each in spec["volumes"] if each["name"] == "kv-disk"]
            wanted = volume if name in PROCESSES[1:] else None
            assert found == ([{"name": "kv-disk", **wanted}] if wanted else [])
        settings = of_kind(objects, "ConfigMap")["kvferry-worker"]["data"]
        assert settings.get("KVFERRY_KV_DISK_GIB") == (str(values["gib"]) if volume else None)
        assert ("KVFERRY_KV_DISK_PATH" in settings) == bool(volume)


def test_every_process_is_told_where_traces_go() -> None:
    """By a variable of OpenTelemetry's, that the tracer listens to."""
    objects = chart(tracing={"endpoint": "http://collector:4318"})
    for process in PROCESSES:
        _, env = container_command(objects, process)
        assert tracing.is_requested(env)
        assert not tracing.is_requested(container_command(chart(), process)[1])


def test_what_is_switched_on_reaches_every_pod() -> None:
    specs = pod_specs(chart(**FULL))
    for name in (*PROCESSES, "kvferry-redis"):
        spec = specs[name]
        assert [each["name"] for each in spec["containers"]][1:] == ["shipper"]
        assert "before" in [each["name"] for each in spec["initContainers"]]
        assert spec["priorityClassName"] == "production"
        assert {"key": "llm", "operator": "Exists"} in spec["tolerations"]
        assert "/more" in [mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]]
        assert {"name": "TZ", "value": "UTC"} in spec["containers"][0]["env"]
        assert spec["nodeSelector"] == {"pool": "llm"}
        assert spec["imagePullSecrets"] == [{"name": "pull"}]
    near = specs["kvferry-decode"]["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"][0]
    assert near["podAffinityTerm"]["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "prefill"
    assert specs["kvferry-prefill"]["affinity"] == {"nodeAffinity": {}}
    for name in PROCESSES[1:]:
        for kind in ("requests", "limits"):
            assert specs[name]["containers"][0]["resources"][kind]["rdma/hca"] == 1


def test_a_store_of_blocks_is_the_workers_alone() -> None:
    """Its keys come as any of theirs."""
    keys = [{"secretRef": {"name": "bucket"}}]
    objects = chart(
        worker={"kvRemote": {"url": "s3://blocks/here", "gib": 50}},
        prefill={"extraEnvFrom": keys},
        decode={"extraEnvFrom": keys},
    )
    maps = {name: item["data"] for name, item in of_kind(objects, "ConfigMap").items() if "data" in item}
    told = {name for name, data in maps.items() if data.get("KVFERRY_KV_REMOTE_URL") == "s3://blocks/here"}
    assert len(told) == 1
    assert maps[told.pop()]["KVFERRY_KV_REMOTE_GIB"] == "50"
    for name, spec in pod_specs(objects).items():
        assert (keys[0] in spec["containers"][0].get("envFrom", [])) == (name in PROCESSES[1:])
    assert not any("KVFERRY_KV_REMOTE_URL" in item.get("data", {}) for item in of_kind(chart(), "ConfigMap").values())


def test_blocks_of_pools_on_a_gpu_are_kept_wherever_a_value_says() -> None:
    kept = {"kvHost": {"gib": 64}, "kvDisk": {"gib": 100}, "kvRemote": {"url": "s3://blocks"}}
    for on_gpu in ({"gpus": 1}, {"device": "cuda"}):
        settings = of_kind(chart(worker={**kept, **on_gpu}), "ConfigMap")["kvferry-worker"]["data"]
        told = [settings[f"KVFERRY_KV_{name}"] for name in ("HOST_GIB", "DISK_GIB", "REMOTE_URL")]
        assert told == ["64", "100", "s3://blocks"]
    assert "KVFERRY_KV_HOST_GIB" not in of_kind(chart(), "ConfigMap")["kvferry-worker"]["data"]


@pytest.mark.parametrize(("gpus", "expected"), [(1, 4), (8, 8), (0, None)])
def test_ranks_of_a_pod_have_a_gpu_each_where_it_has_any(gpus: int, expected: int | None) -> None:
    objects = chart(worker={"tensorParallelSize": 4, "expertParallel": True, "gpus": gpus})
    settings = of_kind(objects, "ConfigMap")["kvferry-worker"]["data"]
    assert settings["KVFERRY_TENSOR_PARALLEL_SIZE"] == "4"
    assert settings["KVFERRY_ENABLE_EXPERT_PARALLEL"] == "true"
    for name in PROCESSES[1:]:
        resources = pod_specs(objects)[name]["containers"][0]["resources"]
        assert [resources[kind].get("nvidia.com/gpu") for kind in ("requests", "limits")] == [expected] * 2


def test_nodes_of_one_rank_are_told_of_none() -> None:
    settings = of_kind(chart(), "ConfigMap")["kvferry-worker"]["data"]
    assert not any("PARALLEL" in name for name in settings)
