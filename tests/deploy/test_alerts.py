"""Every alert fires on what it is for and on nothing that looks alike, however the cluster is scraped; and what is to
be done about it is written down."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.binaries import ROOT
from tests.deploy.dashboard import known_names, metric_names
from tests.deploy.promtool import MONITORING, promtool

ALERTS = MONITORING / "alerts.yml"
RUNBOOKS = ROOT / "deploy" / "runbooks.md"
CASES: dict[str, Any] = yaml.load((MONITORING / "alerts_cases.yml").read_text(), Loader=yaml.BaseLoader)  # noqa: S506
"""All of it text: 0x30 is a series of zeros here, and no number."""
SCRAPES = {
    "annotations": {"job": "kvferry", "namespace": "ns", "pod": "a-pod", "component": "any"},
    "anybody's annotations": {"job": "kubernetes-pods", "namespace": "ns", "pod": "a-pod", "app": "any"},
    "PodMonitor": {
        "job": "ns/kvferry", "namespace": "ns", "pod": "a-pod", "container": "any", "endpoint": "any", "cluster": "east"
    },
    "by hand": {"job": "mine"},
}  # fmt: skip
"""The labels that each adds to all series."""
PARTS = ("What it means", "Look at", "Do")


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def tried(rule: dict[str, Any], case: dict[str, Any], scrape: dict[str, str], *, fires: bool) -> dict[str, Any]:
    """A test of promtool."""
    added = ", ".join(f'{name}="{value}"' for name, value in scrape.items())
    series = [
        {"series": f"{text[:-1]}, {added}}}", "values": values} for text, values in case.get("series", {}).items()
    ]
    expected = []
    if fires:
        own = case.get("labels", {})
        kept = {name: scrape[name] for name in ("cluster", "namespace") if name in scrape and not case.get("bare")}
        pod = {"pod": scrape["pod"]} if "instance" in own and "pod" in scrape else {}
        expected.append(
            {
                "exp_labels": {**rule["labels"], **own, **kept, **pod},
                "exp_annotations": {**rule["annotations"], "summary": case["summary"]},
            }
        )
    return {
        "interval": case.get("every", "1m"),
        "input_series": series,
        "alert_rule_test": [{"eval_time": case["at"], "alertname": rule["alert"], "exp_alerts": expected}],
    }


@pytest.mark.parametrize("scrape", SCRAPES.values(), ids=SCRAPES.keys())
def test_alerts_fire_on_what_they_are_for_and_on_nothing_else(scrape: dict[str, str], tmp_path: Path) -> None:
    files: list[Path] = []
    for rule in alerts():
        by_interval: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for kind in ("fires", "silent"):
            for case in CASES[rule["alert"]][kind]:
                test = tried(rule, case, scrape, fires=kind == "fires")
                by_interval[test["interval"]].append(test)
        for interval, tests in by_interval.items():
            files.append(written(tmp_path / f"{rule['alert']}-{interval}.json", rule, interval, tests))
    assert promtool("test", "rules", *files).count("SUCCESS") == len(files)


def written(path: Path, rule: dict[str, Any], interval: str, tests: list[dict[str, Any]]) -> Path:
    """A file of tests of promtool. It knows this alert alone: with all of them, promtool would compute every alert for
    each test."""
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    rules = path.with_suffix(".rules.json")
    rules.write_text(json.dumps({"groups": [group | {"rules": [rule]}]}))
    path.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": interval, "tests": tests}))
    return path


def test_promtool_would_notice_a_case_that_is_wrong(tmp_path: Path) -> None:
    rule = next(rule for rule in alerts() if rule["alert"] == "KvferryNoDecodeNode")
    test = tried(rule, CASES["KvferryNoDecodeNode"]["silent"][0], SCRAPES["annotations"], fires=False)
    test["alert_rule_test"][0]["exp_alerts"] = [{"exp_labels": rule["labels"]}]
    with pytest.raises(AssertionError, match="FAILED"):
        promtool("test", "rules", written(tmp_path / "cases.json", rule, "1m", [test]))


def test_every_alert_has_cases_of_both_kinds() -> None:
    promtool("check", "rules", ALERTS)
    assert {rule["alert"] for rule in alerts()} == CASES.keys()
    for name, kinds in CASES.items():
        assert set(kinds) == {"fires", "silent"}, name
        assert all(kinds.values()), name
        assert all(case["why"] for case in kinds["silent"]), name


def test_every_metric_of_an_alert_exists_in_rules_and_in_cases() -> None:
    known = known_names()
    for rule in alerts():
        cases = [series for kind in CASES[rule["alert"]].values() for case in kind for series in case["series"]]
        for text in (rule["expr"], *cases):
            assert metric_names(text) <= known, f"{rule['alert']}: {metric_names(text) - known}"
        assert metric_names(rule["expr"]), rule["alert"]


def test_no_alert_depends_on_what_a_job_is_called() -> None:
    for rule in alerts():
        assert not re.search(r"\bjob\s*[=!]", rule["expr"]), rule["alert"]
        if " by (" in rule["expr"]:
            assert re.search(r"\bby \(cluster, namespace\b", rule["expr"]), rule["alert"]


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: str(rule["alert"]))
def test_an_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["alert"].startswith("Kvferry")
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert set(rule["annotations"]) == {"summary", "action", "runbook_url"}
    assert not rule["annotations"]["summary"].endswith(".")
    assert rule["annotations"]["action"].endswith(".")


def sections() -> dict[str, str]:
    """The runbooks by the anchors that their headings get."""
    parts = re.split(r"^## (.+)$", RUNBOOKS.read_text(), flags=re.MULTILINE)[1:]
    return {
        heading.strip().lower().replace(" ", "-"): text for heading, text in zip(parts[::2], parts[1::2], strict=True)
    }


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: str(rule["alert"]))
def test_an_alert_has_a_runbook_and_names_it(rule: dict[str, Any]) -> None:
    path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert (ROOT / path, anchor) == (RUNBOOKS, rule["alert"].lower())
    text = sections()[anchor]
    for part in PARTS:
        said = re.search(rf"^\*\*{part}\.\*\* (.+?)(?=\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
        assert said, f"{rule['alert']}: {part}"
        assert len(said[1]) > 60, f"{rule['alert']}: {part}"


def test_every_runbook_is_of_an_alert_and_names_what_there_is() -> None:
    assert sections().keys() == {rule["alert"].lower() for rule in alerts()}
    assert metric_names(RUNBOOKS.read_text()) <= known_names() | {"kvferry_"}
