"""The supervisor as a process, with a script standing in for router and workers, and a real embedded Valkey."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from kvferry.cli.child_commands import PREFILL_NICENESS, kvferry_program
from kvferry.cli.resource_plan import WorkerPlan
from kvferry.cli.serve import check, cluster_commands
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import ServeSettings
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]


class Cluster:
    """A running fake_serve.py; `gone` ends it and everything it started."""

    def __init__(self, folder: Path, *flags: str, **env: str) -> None:
        self.folder = folder
        self._out, self._err = (folder / "stdout").open("w"), (folder / "stderr").open("w")
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fake_serve.py")), *flags],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "FAKE_DIR": str(folder), **env},
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )
        self.family: list[psutil.Process] = []

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def pids(self, name: str) -> list[int]:
        file = self.folder / f"{name}.pids"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def seen(self, name: str) -> dict:
        return json.loads((self.folder / f"{name}.argv").read_text())

    def until_ready(self) -> None:
        wait_for(lambda: "kvferry is ready" in self.stdout or self.process.poll() is not None, 20)
        assert "kvferry is ready" in self.stdout, self.stderr
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def gone(self) -> None:
        for process in [*self.family, *([self.process] if self.process.poll() is None else [])]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(5)
        self._out.close()
        self._err.close()


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    clusters: list[Cluster] = []

    def starter(*flags: str, **env: str) -> Cluster:
        clusters.append(Cluster(tmp_path, "--port", "0", *flags, **env))
        return clusters[-1]

    yield starter
    for cluster in clusters:
        cluster.gone()


def test_one_ready_line_then_a_clean_end(start, tmp_path):
    (tmp_path / "decode-0.mode").write_text("stubborn")
    cluster = start("--prefill", "2", "--api-key", "s3cret", KVFERRY_MAX_NUM_SEQS="7", KVFERRY_NODE_ID="stray")
    cluster.until_ready()
    (line,) = cluster.stdout.splitlines()
    assert "http://127.0.0.1:" in line
    assert "curl" in line
    assert '"model": "fake-model"' in line
    assert "s3cret" not in line
    assert "[prefill-1] prefill-1 says hello" in cluster.stderr
    assert "decode-0: ready after" in cluster.stderr
    shown = cluster.stderr[cluster.stderr.index("computes on") :].splitlines()
    (row,) = [line for line in shown if line.startswith("prefill-1")]
    assert row.split()[1] == str(cluster.pids("prefill-1")[-1])
    assert "abacus, 3 beads  0.50 GiB  127.0.0.1:7" in row
    assert f"(elsewhere: kill {cluster.process.pid})" in shown[-1]
    names = [" ".join(process.cmdline()) for process in cluster.family]
    assert len([name for name in names if "fake_child.py" in name]) == 4
    assert any("valkey-server" in name for name in names)
    assert not any("s3cret" in name for name in names)
    group = os.getpgid(cluster.process.pid)
    assert {os.getpgid(process.pid) for process in cluster.family} == {group}

    router, prefill = cluster.seen("router"), cluster.seen("prefill-1")
    assert router["env"]["KVFERRY_API_KEY"] == "s3cret"
    assert set(prefill["env"]) == {"KVFERRY_STATUS_FD", "KVFERRY_CLUSTER_SECRET"}
    assert prefill["env"]["KVFERRY_CLUSTER_SECRET"] == router["env"]["KVFERRY_CLUSTER_SECRET"] != ""
    assert prefill["argv"][prefill["argv"].index("--max-num-seqs") + 1] == "7"
    assert prefill["argv"][0] == "prefill"
    assert "--port" not in prefill["argv"]

    began = time.monotonic()
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.process.wait(6) == 0
    assert time.monotonic() - began < 5
    assert not [process for process in cluster.family if alive(process)]


def test_no_other_user_of_the_machine_reaches_the_embedded_valkey(start):
    """Who writes a lease redirects prompts: it listens on no port, but in a folder that only its user can enter."""
    cluster = start()
    cluster.until_ready()
    (valkey,) = [process for process in cluster.family if "valkey-server" in process.name()]
    assert not valkey.net_connections("inet")
    (socket,) = [Path(each.laddr) for each in valkey.net_connections("unix") if each.laddr]
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(socket.stat().st_mode) & 0o077 == 0
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.process.wait(6) == 0
    assert not socket.parent.exists()


def test_ctrl_c_reaches_the_whole_group_and_nothing_is_restarted(start, tmp_path):
    (tmp_path / "decode-0.mode").write_text("stubborn")
    cluster = start()
    cluster.until_ready()
    (valkey,) = [process for process in cluster.family if "valkey-server" in process.name()]
    os.killpg(os.getpgid(cluster.process.pid), signal.SIGINT)
    time.sleep(1)
    assert alive(valkey)
    assert cluster.process.wait(5) == 0
    assert not [process for process in cluster.family if alive(process)]
    assert len(cluster.pids("prefill-0")) == 1


def test_a_killed_supervisor_takes_its_children_along(start, tmp_path):
    (tmp_path / "prefill-0.mode").write_text("stubborn")
    cluster = start()
    cluster.until_ready()
    cluster.process.kill()
    cluster.process.wait(5)
    wait_for(lambda: not [process for process in cluster.family if alive(process)], 5)


def test_a_dead_child_is_restarted(start):
    cluster = start("--prefill", "0")
    cluster.until_ready()
    os.kill(cluster.pids("decode-0")[0], signal.SIGKILL)
    wait_for(lambda: len(cluster.pids("decode-0")) == 2, 5)
    cluster.family = psutil.Process(cluster.process.pid).children(recursive=True)
    assert "decode-0 ended (SIGKILL: out of memory?); restarting it in 0.5 s" in cluster.stderr
    assert cluster.pids("router")[0] in {process.pid for process in cluster.family}
    assert cluster.stdout.count("kvferry is ready") == 1


def test_a_refusal_at_start_ends_the_cluster_with_its_line(start, tmp_path):
    (tmp_path / "prefill-0.mode").write_text("refuse")
    cluster = start()
    assert cluster.process.wait(20) == 2
    errors = [line for line in cluster.stderr.splitlines() if "error:" in line]
    assert errors == ["kvferry: error: prefill-0: out of memory for the KV pool; lower --kv-cache-gib"]
    assert cluster.stdout == ""
    for name in ("router", "prefill-0", "decode-0"):
        assert not [pid for pid in cluster.pids(name) if psutil.pid_exists(pid)]


def test_a_child_that_never_starts_is_given_up(start, tmp_path):
    (tmp_path / "decode-0.mode").write_text("crash")
    cluster = start()
    assert cluster.process.wait(20) == 3
    assert "kvferry: error: decode-0 ended 3 times before it was ready (exit status 3): too deep" in cluster.stderr
    assert len(cluster.pids("decode-0")) == 3


def test_a_model_that_cannot_run_is_refused_before_anything_starts(start, tmp_path):
    model = tmp_path / "deep"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "minicpm3", "vocab_size": 9, "kv_lora_rank": 512}))
    (model / "model.safetensors").write_bytes(b"\0" * 9)
    cluster = start("--model", str(model))
    assert cluster.process.wait(20) == 2
    (line,) = cluster.stderr.splitlines()
    assert line.startswith("kvferry: error: deep (minicpm3) cannot be served: its latent attention (MLA)")
    assert not list(tmp_path.glob("*.pids"))


def test_mistakes_are_one_line_and_status_2_before_anything_starts(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = {
            ("--port", port): "--port",
            ("--port", "0", "--model", "/no/such/dir"): "no such model",
            ("--port", "0", "--chat-template", "/no/such/file"): "--chat-template",
            ("--port", "0", "--redis-url", "redis://127.0.0.1:1/0"): "--redis-url",
            ("--port", "0", "--redis-url", "redis://u:hunter2@127.0.0.1:1/0"): "redis://u:***@127.0.0.1:1/0",
            ("--port", "0", "--redis-url", "redis://:hunter2/x@h:1/0"): "%2F",
            ("--port", "0", "--redis-password-file", "/x"): "--redis-password-file needs --redis-url",
            ("--port", "0", "--host", "192.0.2.1"): "--host",
            ("--port", "0", "--dtype", "int3"): "--dtype",
            ("--port", "0", "--device", "cpu", "--kv-cache-gib", "100000"): "--kv-cache-gib",
            ("--port", "0", "--model", str(tmp_path)): "give a model's own directory",
            ("--port", "0", "--model", "smollm2", "--model", "smollm2"): "--served-model-name",
            ("--port", "0", "--served-model-name", ","): "--served-model-name",
            ("--port", "0", "--model", "smollm2", "--model", "x", "--lora", "a=/a"): "--lora",
        }
        for flags, remedy in cases.items():
            cluster = Cluster(tmp_path, *flags)
            try:
                assert cluster.process.wait(20) == 2
                (line,) = cluster.stderr.splitlines()
                assert line.startswith("kvferry: error: ")
                assert remedy in line
                assert "hunter2" not in line
                assert not list(tmp_path.glob("*.pids"))
            finally:
                cluster.gone()


def test_ready_is_said_when_the_router_sees_every_node(start, tmp_path):
    """A prompt that comes a moment earlier would be computed on decode, as if there were no prefill node."""
    (tmp_path / "router.mode").write_text("unaware")
    cluster = start()
    wait_for(lambda: "prefill-0: ready after" in cluster.stderr and "decode-0: ready after" in cluster.stderr, 20)
    time.sleep(0.5)
    assert not cluster.stdout
    (tmp_path / "prefill.seen").touch()
    cluster.until_ready()


def test_a_cache_that_cannot_be_batch_invariant_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="batch_invariant is not supported with kv_cache_dtype fp8"):
        check(ServeSettings(kv_cache_dtype="fp8", batch_invariant=True))


def test_children_get_a_url_with_a_password_where_nobody_sees_it():
    for url in ("redis://u:hunter2@h:1/0", "redis+sentinel://h:1/kv?sentinel_password=hunter2"):
        settings = ServeSettings(redis_url=url, redis_password_file="/run/password")
        for command in cluster_commands(settings, [WorkerPlan("cpu")] * 2, lambda subcommand: ["kvferry", subcommand]):
            assert not any("hunter2" in word for word in command.argv)
            assert command.env["KVFERRY_REDIS_URL"] == url
            assert command.argv[command.argv.index("--redis-password-file") + 1] == "/run/password"


def test_children_get_only_what_differs_from_their_defaults():
    settings = ServeSettings(
        redis_url="redis://127.0.0.1:1/0", prefill=1, decode=2, port=8123, host="0.0.0.0", threads=3, kv_blocks=9
    )
    plans = [WorkerPlan("cpu"), WorkerPlan("cuda:0", 1.5), WorkerPlan("cuda:1")]
    router, prefill, first, second = cluster_commands(settings, plans, lambda subcommand: ["kvferry", subcommand])
    assert router.argv == (
        "kvferry",
        "router",
        "--redis-url",
        settings.redis_url,
        "--host",
        "0.0.0.0",
        "--port",
        "8123",
        "--queue-timeout",
        "15.0",
    ), "a supervised node is soon there again, and is waited for"
    assert prefill.argv[:2] == ("kvferry", "prefill")
    assert "0.0.0.0" not in prefill.argv, "workers of a local cluster are not reachable from outside"
    assert {"--threads", "3", "--kv-blocks", "9", "--respawned"} <= set(prefill.argv)
    assert (first.name, second.name) == ("decode-0", "decode-1")
    assert {"--device", "cuda:0", "--kv-cache-gib", "1.5"} <= set(first.argv)
    assert "cuda:1" in second.argv
    assert "--kv-cache-gib" not in second.argv
    assert prefill.niceness > 0, "running streams come before prompts"
    assert {router.niceness, first.niceness, second.niceness} == {0}
    assert second.argv[second.argv.index("--node-id") + 1] == "decode-1"


@pytest.mark.parametrize(
    ("threads", "devices", "sharing"),
    [
        (4096, ("cpu", "cpu", "cpu"), 3),
        (4096, ("cpu", "cpu", "cuda:0"), 2),
        (4096, ("cpu", "cuda:0", "cuda:1"), 0),
        (1, ("cuda:0", "cuda:1", "cpu"), 0),
    ],
)
def test_workers_that_compute_on_the_same_cores_share_them(threads, devices, sharing):
    settings = ServeSettings(redis_url="redis://127.0.0.1:1/0", prefill=1, decode=2, threads=threads)
    plans = [WorkerPlan(device) for device in devices]
    router, *workers = cluster_commands(settings, plans, lambda subcommand: ["kvferry", subcommand], cores_fd=7)
    assert sum(["--cores-fd", "7"] in map(list, pairwise(worker.argv)) for worker in workers) == sharing
    assert [worker.fds for worker in workers].count((7,)) == sharing
    assert router.fds == ()


@pytest.mark.parametrize(
    ("devices", "given"),
    [
        (("cpu", "cpu", "cpu", "cpu"), [10, 10, 11, 11]),
        (("cpu", "cpu", "cuda:0", "cpu"), [10, 10, -1, -1]),
        (("cuda:0", "cpu", "cuda:0", "cuda:1"), [-1, -1, -1, -1]),
    ],
)
def test_workers_of_a_model_on_the_cpu_are_given_one_copy_of_its_weights(devices, given):
    settings = ServeSettings(redis_url="redis://127.0.0.1:1/0", model=("/m/a", "/m/b"), threads=1)
    plans, made = [WorkerPlan(device) for device in devices], iter((10, 11))
    program = lambda subcommand: ["kvferry", subcommand]  # noqa: E731
    _, *workers = cluster_commands(settings, plans, program, weights=lambda: next(made))
    assert [worker.fds for worker in workers] == [(each,) if each >= 0 else () for each in given]
    for worker, each in zip(workers, given, strict=True):
        assert (["--weights-fd", str(each)] in map(list, pairwise(worker.argv))) == (each >= 0)


def test_nodes_of_several_ranks_divide_the_cores_and_have_no_one_copy(monkeypatch):
    monkeypatch.setattr("kvferry.cli.bootstrap.available_cores", lambda: 4)
    monkeypatch.setattr("kvferry.cli.serve.available_cores", lambda: 4)
    settings = ServeSettings(redis_url="redis://127.0.0.1:1/0", tensor_parallel_size=2)
    program = lambda subcommand: ["kvferry", subcommand]  # noqa: E731
    _, *workers = cluster_commands(settings, [WorkerPlan("cpu")] * 2, program, cores_fd=7, weights=lambda: 10)
    assert [worker.fds for worker in workers] == [(7,), (7,)]
    for worker in workers:
        given = set(pairwise(worker.argv))
        assert {("--threads", "2"), ("--tensor-parallel-size", "2"), ("--cores-fd", "7")} <= given


def test_each_model_has_workers_of_its_own_and_the_router_all_models():
    settings = ServeSettings(
        redis_url="redis://127.0.0.1:1/0", model=("/m/a", "/m/b"), served_model_name=("a,first", "b"), decode=2
    )
    plans = [WorkerPlan(f"cuda:{index}") for index in range(6)]
    router, *workers = cluster_commands(settings, plans, lambda subcommand: ["kvferry", subcommand])
    models = ["--model", "/m/a", "--model", "/m/b"]
    names = ["--served-model-name", "a,first", "--served-model-name", "b"]
    assert [word for word in router.argv if word in {*models, *names}] == [*names, *models]
    assert [worker.name for worker in workers] == [
        "prefill-0", "decode-0", "decode-1", "prefill-1", "decode-2", "decode-3"
    ]  # fmt: skip
    for index, worker in enumerate(workers):
        given = {flag: [b for a, b in pairwise(worker.argv) if a == flag] for flag in worker.argv if flag[0] == "-"}
        assert given["--model"] == (["/m/a"] if index < 3 else ["/m/b"])
        assert given["--served-model-name"] == (["a", "first"] if index < 3 else ["b"])
        assert given["--device"] == [f"cuda:{index}"]
        assert given["--node-id"] == [worker.name]


def test_the_program_is_the_console_script_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert kvferry_program("router") == [str(tmp_path / "python"), "-m", "kvferry.cli.main", "router"]
    (tmp_path / "kvferry").touch()
    assert kvferry_program("router") == [str(tmp_path / "kvferry"), "router"]


def test_nodes_that_change_their_roles_are_all_told_so_and_none_gives_way() -> None:
    """A process cannot take its priority back when it is to decode."""
    settings = ServeSettings(redis_url="redis://127.0.0.1:1/0", elastic=True, elastic_rest=5.0)
    plans = [WorkerPlan("cpu"), WorkerPlan("cpu")]
    commands = cluster_commands(settings, plans, lambda subcommand: ["kvferry", subcommand])
    assert all("--elastic" in command.argv for command in commands)
    assert ["--elastic-rest" in command.argv for command in commands] == [True, False, False]
    assert {command.niceness for command in commands} == {0}


def test_encode_nodes_follow_the_other_nodes_and_do_not_change_their_role() -> None:
    settings = ServeSettings(redis_url="redis://r", model=("m",), encode=2, elastic=True)
    commands = cluster_commands(settings, [WorkerPlan("cpu")] * 4, lambda subcommand: ["kvferry", subcommand])
    encoders = [command for command in commands if command.argv[1] == "encode"]
    assert [command.name for command in commands[1:]] == ["prefill-0", "decode-0", "encode-0", "encode-1"]
    assert ["--elastic" in command.argv for command in commands[1:]] == [True, True, False, False]
    assert {command.niceness for command in encoders} == {PREFILL_NICENESS}


def test_encode_nodes_of_a_model_on_several_ranks_run_on_one() -> None:
    """They refuse to start otherwise: they load no decoder that could be split."""
    settings = ServeSettings(redis_url="redis://r", model=("m",), encode=1, tensor_parallel_size=2)
    commands = cluster_commands(settings, [WorkerPlan("cpu")] * 3, lambda subcommand: ["kvferry", subcommand])
    ranks = {command.argv[1]: "--tensor-parallel-size" in command.argv for command in commands[1:]}
    assert ranks == {"prefill": True, "decode": True, "encode": False}
