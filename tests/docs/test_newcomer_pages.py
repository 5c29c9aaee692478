"""The pages of a newcomer's three jobs say what the chart, the dashboard and the command line really do."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import yaml
from click.testing import CliRunner

from kvferry.cli.main import kvferry
from tests.deploy.charts import chart
from tests.deploy.dashboard import known_names
from tests.deploy.manifests import of_kind

ROOT = Path(__file__).parents[2]
KUBERNETES, HIT_RATE, OWN_MODEL = (
    (ROOT / "docs" / "how-to" / name).read_text() for name in ("kubernetes.md", "hit-rate.md", "own-model.md")
)


def blocks(page: str, language: str) -> list[str]:
    """Return the page's code blocks in this language."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def test_the_values_give_as_many_pods_as_the_title_says() -> None:
    (values,) = (yaml.safe_load(block) for block in blocks(KUBERNETES, "yaml"))
    objects = chart("chat", **values)
    replicas = {name: item["spec"]["replicas"] for name, item in of_kind(objects, "Deployment").items()}
    wanted = re.match(r"# Kubernetes with (\d) prefill and (\d) decode pods", KUBERNETES)
    assert wanted
    assert (replicas["chat-kvferry-prefill"], replicas["chat-kvferry-decode"]) == tuple(map(int, wanted.groups()))
    commands = "\n".join(blocks(KUBERNETES, "sh"))
    assert set(re.findall(r"deployment/([\w-]+)", commands)) <= replicas.keys()
    services = {name: item["spec"]["ports"][0]["port"] for name, item in of_kind(objects, "Service").items()}
    ((service, port),) = re.findall(r"service/([\w-]+) \d+:(\d+)", commands)
    assert services[service] == int(port)


def test_the_query_and_the_panel_of_the_hit_rate_exist() -> None:
    query = next(block for block in blocks(HIT_RATE, "sh") if "query=" in block)
    named = set(re.findall(r"kvferry_\w+", query))
    assert named
    assert named <= known_names()
    (dashboard,) = re.findall(r"`(deploy/monitoring/dashboards/[\w-]+\.json)`", HIT_RATE)
    panels = json.dumps(json.loads((ROOT / dashboard).read_text())["panels"])
    assert "Hit rate by role" in panels
    assert "Misses by reason" in panels


def test_the_command_line_knows_every_command_and_flag() -> None:
    lines = "\n".join(blocks(OWN_MODEL, "sh")).replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith(".venv/bin/kvferry")]
    assert len(commands) >= 3
    for name, *words in commands:
        help_text = CliRunner().invoke(kvferry, [name, "--help"])
        assert help_text.exit_code == 0, help_text.output
        flags = {word for word in words if word.startswith("--")}
        assert flags <= set(re.findall(r"--[\w-]+", help_text.output)), name
