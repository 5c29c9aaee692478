"""What the pages for operators name exists: values of the chart, settings, metrics, panels, and the commands that they
have one type."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from kvferry.cli.main import kvferry
from kvferry.cli.options import ENV_PREFIX, variable
from tests.deploy.binaries import ROOT
from tests.deploy.charts import CHART
from tests.deploy.dashboard import known_names, load, metric_names
from tests.deploy.manifests import Manifest

DEPLOY = ROOT / "deploy"
PAGES = {
    str(page.relative_to(DEPLOY)): page.read_text()
    for page in (*DEPLOY.glob("*.md"), CHART / "README.md", DEPLOY / "compose" / "README.md")
}
ADAPTERS = {"kvferry_prefill_backlog"}
"""Metrics that the metrics adapter serves."""
VALUES = json.loads((CHART / "values.schema.json").read_text())["properties"]


def known(path: list[str], schema: Manifest) -> bool:
    """Whether there is such a value; inside objects of Kubernetes, whatever is there."""
    if not path:
        return True
    parts = schema.get("properties", {})
    return known(path[1:], parts[path[0]]) if path[0] in parts else not parts


@pytest.mark.parametrize("page", PAGES)
def test_values_are_in_the_chart(page: str) -> None:
    spoken = re.findall(rf"`((?:{'|'.join(VALUES)})(?:\.[a-zA-Z]+)+)(?:: [^`]*)?`", PAGES[page])
    wrong = [name for name in spoken if not known(name.split("."), {"properties": VALUES})]
    assert set(wrong) <= {"model.uri"}, "that of KServe's own object"


def test_a_wrong_value_would_be_noticed() -> None:
    assert known(["worker", "kvDisk", "gib"], {"properties": VALUES})
    assert not known(["worker", "kvDisc", "gib"], {"properties": VALUES})


@pytest.mark.parametrize("page", PAGES)
def test_settings_metrics_and_panels_exist(page: str) -> None:
    settings = {variable(each.name) for command in kvferry.commands.values() for each in command.params if each.name}
    settings |= set(re.findall(rf"\b{ENV_PREFIX}\w+", (DEPLOY / "compose" / "compose.yaml").read_text()))
    told = PAGES[page]
    named = set(re.findall(rf"`({ENV_PREFIX}[A-Z_]+)", told)) - {"KVFERRY_ROUTER_PORT"}  # of Kubernetes
    assert named <= settings, named - settings
    ours = metric_names(told) - ADAPTERS
    assert ours <= known_names(), ours - known_names()


def test_panels_that_the_guide_looks_at_exist() -> None:
    boards = load()
    titles = {panel["title"] for board in boards.values() for panel in board["panels"]}
    titles |= {name.replace("-", " ") for name in boards} | {"Overview"}
    text = re.sub(r"\*\*.+?\*\*", "", PAGES["README.md"].partition("## Sizes")[2])
    named = {
        re.sub(r"\s+", " ", name) for name in re.findall(r"(?<![\w*`])\*([A-Za-z][^*`\n|]*(?:\n[^*`\n|]*)?)\*", text)
    }
    assert len(named) > 6
    assert named <= titles, named - titles


def test_commands_that_it_has_one_type_parse() -> None:
    """kvferry's own, in a shell, a container or a pod."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", "".join(PAGES.values()), re.DOTALL))
    lines = [line.partition("#")[0] for line in blocks.splitlines()]
    typed = [found[1] for line in lines if (found := re.search(r"(?:^kvferry|-- kvferry|worker:\S+) (\w.*)", line))]
    assert len(typed) > 1
    for words in typed:
        command, *flags = shlex.split(words.partition(">>")[0])
        kvferry.commands[command].make_context(command, flags)
