"""`kvferry serve`: checks, starts and supervises a whole cluster on this machine."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import json
import logging
import os
import secrets
import signal
import ssl
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from kvferry.cli import preflight
from kvferry.cli.bootstrap import worker_threads
from kvferry.cli.child import Child, Command
from kvferry.cli.child_commands import Program, kvferry_program, settings_command
from kvferry.cli.embedded_valkey import private_folder, until_valkey_answers, valkey_command
from kvferry.cli.engines import attached, checked_engines, engine_commands
from kvferry.cli.gpu_detection import gpus
from kvferry.cli.progress import Progress, log_through, progress_on
from kvferry.cli.ready_message import overview, ready_line, stop_line
from kvferry.cli.resource_plan import WorkerPlan, needs_of, on_cpu_by_model, plan_workers, require_memory
from kvferry.cli.router_commands import narrowed, router_commands
from kvferry.cli.supervisor import Supervisor
from kvferry.engine.shared_cores import core_lock
from kvferry.model_files.model_name import ModelName, require_distinct, split_names
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.labels import NODE_ROLES, ROLES
from kvferry.protocol.layout import cache_format
from kvferry.protocol.media import TRANSCRIPTION
from kvferry.protocol.settings import ServeSettings, WorkerSettings
from kvferry.runtime import shared_file
from kvferry.runtime.address import dialable, host_port, loopback
from kvferry.runtime.cluster_secret import ClusterSecrets
from kvferry.runtime.limits import available_cores

log = logging.getLogger(__name__)

ALL_NODES_S = 10.0
"""Maximum wait of the ready line, in seconds, for the router to see all nodes; it polls twice a second."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Checked settings and worker plans of a cluster, ready to start.

    settings: with the router's real port. plans: for each model its workers of each role, as in NODE_ROLES."""

    settings: ServeSettings
    plans: tuple[WorkerPlan, ...]


def check(settings: ServeSettings) -> Checked:
    """Check everything that can fail before a process starts. Raises ConfigError."""
    from kvferry.model_files.draft_model import resolve_draft
    from kvferry.model_files.unsupported_models import resolve_runnable

    cache_format(settings.kv_cache_dtype, batch_invariant=settings.batch_invariant)
    port = preflight.free_port(settings.host, settings.port)
    if attached(settings):
        settings = checked_engines(settings)
    else:
        preflight.worker_packages()
    for name in ("chat_template", "api_keys", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "cluster_secret_file"):
        preflight.readable(getattr(settings, name), name.replace("_", "-"))
    if settings.redis_url:
        preflight.check_redis(settings)
    elif settings.redis_password_file:
        raise ConfigError("--redis-password-file needs --redis-url", param="redis_password_file")
    else:
        preflight.valkey_binary()
    if settings.lora and len(settings.model) > 1:
        raise ConfigError("--lora needs a single model; with several, start the workers separately", param="lora")
    served = split_names(settings.served_model_name, len(settings.model))
    if attached(settings):
        resolve(settings.model[0])
        plans: Sequence[WorkerPlan] = ()
    else:
        sources = [resolve_runnable(model, settings.load_format) for model in settings.model]
        require_distinct([ModelName(source.name, names) for source, names in zip(sources, served, strict=True)])
        settings = preflight.speech_settings(settings, sources)
        for source in sources:
            resolve_draft(settings, source)
        needs = [needs_of(source) for source in sources]
        plans = plan_workers(settings, needs, gpus())
        preflight.ranks(settings, needs)
        require_memory(settings, needs, plans)
    secret = settings.cluster_secret
    if not ClusterSecrets(settings):
        secret = secrets.token_hex(32)
    return Checked(dataclasses.replace(settings, port=port, cluster_secret=secret), tuple(plans))


def cluster_commands(
    settings: ServeSettings,
    plans: Sequence[WorkerPlan],
    program: Program,
    cores_fd: int = -1,
    weights: Callable[[], int] = lambda: -1,
    folder: Path = Path(),
) -> list[Command]:
    """Return the commands of the routers and of a worker for each seat.

    `settings.redis_url` must be set. Only routers listen beyond this machine, and only with such a --host.
    cores_fd: lock for workers that share cores. weights: creates the shared memory for the weights of a model with
    several workers on the CPU. folder: of mode 0700, for the sockets of other engines."""
    commands = router_commands(settings, program)
    served = split_names(settings.served_model_name, len(settings.model))
    if attached(settings):
        source = resolve(settings.model[0])
        name = (served[0] or (source.name,))[0]
        if not settings.attach and not settings.engine_revision:
            settings = dataclasses.replace(settings, engine_revision=source.revision)
        return commands + engine_commands(settings, str(source.path), name, program, folder)
    threads = worker_threads(settings.threads, settings.tensor_parallel_size)
    on_cpu = sum(plan.device == "cpu" for plan in plans)
    shares_cores = on_cpu > 1 and threads * settings.tensor_parallel_size * on_cpu > available_cores()
    own_host = loopback()
    counts, remaining = {role: getattr(settings, role) for role in NODE_ROLES}, iter(plans)
    roles = [role for role, number in counts.items() for _ in range(number)]
    numbers = {role: count() for role in roles}
    shared = [
        weights() if count > 1 and settings.tensor_parallel_size == 1 else -1
        for count in on_cpu_by_model(plans, len(settings.model))
    ]
    for model, names, weights_fd in zip(settings.model, served, shared, strict=True):
        for role in roles:
            plan, name = next(remaining), f"{role}-{next(numbers[role])}"
            worker = dataclasses.replace(
                narrowed(WorkerSettings, settings),
                model=model,
                served_model_name=names,
                role=role,
                elastic=settings.elastic and role in ROLES,
                node_id=name,
                host=own_host,
                port=0,
                ssl_certfile="",
                ssl_keyfile="",
                ssl_ca_certs="",
                tensor_parallel_size=1 if role == "encode" else settings.tensor_parallel_size,  # it has no decoder
                threads=threads,
                cores_fd=cores_fd if shares_cores and plan.device == "cpu" else -1,
                weights_fd=weights_fd if plan.device == "cpu" else -1,
                device=plan.device,
                kv_cache_gib=plan.kv_cache_gib,
                respawned=True,
            )
            commands.append(settings_command(name, role, worker, program))
    return commands


async def serve_cluster(checked: Checked, program: Program = kvferry_program) -> None:
    """Run the cluster that `check` allowed until SIGINT, SIGTERM or SIGHUP.

    When it returns or raises, no child runs. Raises ConfigError or KvferryError if the cluster cannot run."""
    progress = progress_on(form=checked.settings.log_format)
    log_through(progress)
    supervisor = Supervisor(progress.echo, lambda child: _show(progress, child))
    ending = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    settings, valkey = checked.settings, None
    with private_folder() as folder:
        if not settings.redis_url:
            valkey = valkey_command(folder, settings.log_level)
        try:
            await supervisor.watch(_live(supervisor, checked, program, progress, valkey, folder), ending)
        finally:
            progress.close()
            await supervisor.stop()


async def _live(
    supervisor: Supervisor,
    checked: Checked,
    program: Program,
    progress: Progress,
    valkey: Command | None,
    folder: Path,
) -> None:
    settings = checked.settings
    if valkey is not None:
        settings = dataclasses.replace(settings, redis_url=valkey.address)
        supervisor.start(valkey)
    weights = shared_file.make if settings.share_weights else lambda: -1
    commands = cluster_commands(settings, checked.plans, program, core_lock.make(), weights, folder)
    children = [child for child in map(supervisor.start, commands) if child.command.reports]
    for child in children:
        _show(progress, child)
    if valkey is not None:
        await until_valkey_answers(valkey)
    await supervisor.ready(children)
    await _until_router_serves(children[0], settings)
    model = children[0].facts.get("model", "")
    progress.close()
    for line in overview(supervisor.children):
        progress.echo(line)
    speech = children[-1].facts.get("task") == TRANSCRIPTION
    key = settings.api_key or settings.api_keys
    print(ready_line(_dialable(settings), model, key, speech=speech), flush=True)
    progress.echo(stop_line(os.getpid()))
    await asyncio.Event().wait()


async def _until_router_serves(router: Child, settings: ServeSettings) -> None:
    """Wait until the router can place requests on all nodes, or for ALL_NODES_S.

    With a registry that other clusters share it may never see all nodes. A router that requires client certificates
    cannot be queried; its own ready report suffices."""
    if settings.ssl_ca_certs:
        return
    models = len(settings.model)
    expected = {role: models * getattr(settings, role) for role in NODE_ROLES}
    deadline = time.monotonic() + ALL_NODES_S
    # Our own child, on this machine; its certificate may name others.
    unverified = ssl._create_unverified_context()  # noqa: S323
    handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unverified))
    opener = urllib.request.build_opener(*handlers)

    def ready() -> bytes:
        with opener.open(f"{router.url}/ready?nodes=1", timeout=2.0) as response:
            return bytes(response.read())

    while True:
        try:
            nodes = json.loads(await asyncio.to_thread(ready))["nodes"]
            if all(nodes.get(role, 0) >= count for role, count in expected.items()) or time.monotonic() > deadline:
                return
        except (OSError, http.client.HTTPException) as error:
            log.debug("the router does not answer yet: %s", error)
        await asyncio.sleep(0.1)


def _dialable(settings: ServeSettings) -> str:
    scheme = "https" if settings.ssl_certfile else "http"
    return f"{scheme}://{host_port(dialable(settings.host), settings.port)}{settings.root_path}"


def _show(progress: Progress, child: Child) -> None:
    progress.update(child.name, child.progress, child.ready.is_set())
