"""Entry point of `kvferry router`."""

from __future__ import annotations

import asyncio
import logging
import signal

from kv_transfer.redis_store import RedisStore
from node.http import bind, make_server
from node.status import Status
from protocol.metrics import RouterMetrics
from protocol.settings import RouterSettings
from router.app import create_app
from router.cluster import RouterCluster
from router.text_model import load_text_model

log = logging.getLogger(__name__)


async def serve_router(settings: RouterSettings) -> None:
    """Run a router until SIGTERM or SIGINT: then no new connections, and requests under way may finish within the
    server's grace. Raises ConfigError when it cannot start."""
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    status = Status.from_fd(settings.status_fd)
    sock = bind(settings.host, settings.port)
    text = await asyncio.to_thread(load_text_model, settings)
    metrics = RouterMetrics()
    store = RedisStore(settings.redis_url, settings.cluster)
    async with RouterCluster(store, store, metrics, local_tokens=settings.local_prefill_tokens) as cluster:
        server = make_server(create_app(settings, cluster, text, metrics))
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        url = f"http://{settings.host}:{sock.getsockname()[1]}"
        log.info("router ready at %s", url)
        status.ready(url)
        await stopping.wait()
        server.should_exit = True
        await serving
    await store.close()
