"""Who shows no secret of the cluster gets health and metrics of a node, and nothing else."""

from __future__ import annotations

import dataclasses

import httpx
import pytest

from kvferry.protocol.errors import ConfigError, OtherCluster, from_body
from kvferry.protocol.settings import WorkerSettings
from kvferry.runtime.cluster_secret import HEADER, OPEN, ClusterSecrets, read_secrets
from kvferry.runtime.http import make_app

SECRET = "correct horse battery"


def test_file_and_variable_give_the_same_keys_and_neither_shows_the_secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    one = ClusterSecrets(WorkerSettings(cluster_secret=SECRET))
    assert ClusterSecrets(WorkerSettings(cluster_secret_file=str(path))).tokens() == one.tokens()
    assert one
    assert one.links()[0].hex() != one.token()
    assert one.token() not in repr(read_secrets(SECRET))
    assert SECRET.encode() not in one.links()[0] + one.token().encode()
    assert not ClusterSecrets(WorkerSettings())
    assert ClusterSecrets(WorkerSettings(cluster_secret=SECRET + "!")).token() != one.token()


def test_a_secret_that_cannot_be_read_or_is_short_is_refused_by_name(tmp_path):
    (tmp_path / "short").write_text("0123456789")
    for name, field in (("absent", "cluster_secret_file"), ("short", "cluster_secret_file")):
        with pytest.raises(ConfigError) as refused:
            ClusterSecrets(WorkerSettings(cluster_secret_file=str(tmp_path / name)))
        assert refused.value.param == field
    with pytest.raises(ConfigError, match="16 characters"):
        ClusterSecrets(WorkerSettings(cluster_secret="short"))
    for text, told in (
        ("", "got 0"),
        ("\n".join(SECRET + str(n) for n in range(17)), "got 17"),
        (f"{SECRET}\nshort", "got 5"),
    ):
        with pytest.raises(ConfigError, match=told) as refused:
            read_secrets(text)
        assert SECRET not in str(refused.value)


@pytest.mark.parametrize("shown", [None, "", "wrong", read_secrets("0" * 16)[0].token])
async def test_only_members_get_beyond_health(shown, caplog):
    secrets = ClusterSecrets(WorkerSettings(cluster_secret=SECRET))
    app = make_app(lambda: (200, {}), lambda: "", secrets.tokens)
    reached = []

    @app.post("/attempts/prefill")
    async def prefill() -> None:
        reached.append(1)

    @app.get("/metrics")
    async def metrics() -> None:
        """Open."""

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node") as http:
        headers = {} if shown is None else {HEADER: shown}
        for path in OPEN:
            assert (await http.get(path)).status_code == 200
        for _ in range(3):
            refused = await http.post("/attempts/prefill", headers=headers)
            assert refused.status_code == 403
            assert isinstance(from_body(refused.json()), OtherCluster)
        assert (await http.get("/streams/r", headers=headers)).status_code == 403
        assert not reached
        assert caplog.text.count("rejecting a request of ") == 1
        assert (await http.post("/attempts/prefill", headers={HEADER: secrets.token()})).status_code == 200
    assert reached


async def test_without_a_secret_everybody_is_answered():
    app = make_app(lambda: (200, {}), lambda: "")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node") as http:
        assert (await http.get("/streams/r")).status_code == 404


def test_settings_do_not_show_the_secret_in_a_command_line():
    from kvferry.cli.serve import cluster_commands
    from kvferry.protocol.settings import ServeSettings

    settings = ServeSettings(cluster_secret=SECRET, redis_url="redis://x", prefill=0)
    commands = cluster_commands(settings, [_seat()], lambda name: ["kvferry", name])
    for command in commands:
        assert SECRET not in " ".join(command.argv)
        assert command.env["KVFERRY_CLUSTER_SECRET"] == SECRET
    assert dataclasses.replace(settings, cluster_secret="").cluster_secret == ""


def _seat():
    from kvferry.cli.resource_plan import WorkerPlan

    return WorkerPlan("cpu", 1.0)
