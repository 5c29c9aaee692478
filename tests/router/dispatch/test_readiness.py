"""Whether a router that starts may take the place of one before it."""

from __future__ import annotations

from kvferry.protocol.lease import IncompatibleLease
from tests.fake_workers import Bench, FakeWorker, until


def decode() -> FakeWorker:
    return FakeWorker("d0", "decode")


async def test_only_once_the_registry_has_answered() -> None:
    """Else a rollout while Redis is away ends the routers that remember their nodes."""
    bench = Bench([])
    bench.store.available = False
    async with bench:
        assert bench.cluster.trouble()
        bench.store.available = True
        await until(lambda: bench.nodes.registry_health.up)
        assert not bench.cluster.trouble(), "without any node, too: the first request may bring one"
        bench.store.available = False
        await until(lambda: not bench.nodes.registry_health.up)
        assert not bench.cluster.trouble(), "it goes on with what it knows"


async def test_not_while_others_serve_what_it_cannot() -> None:
    """In an upgrade to another wire version nodes take longer to come than routers; those before serve until then."""
    bench = Bench([])
    bench.store.incompatible = (IncompatibleLease("d9", "decode", "speaks another wire version"),)
    async with bench:
        await until(lambda: bench.nodes.registry_health.up)
        assert bench.cluster.trouble()
        await bench.add(decode())
        await until(lambda: bool(bench.cluster.ready()["decode"]))
        assert not bench.cluster.trouble()
        await bench["d0"].stop()
        assert not bench.cluster.trouble(), "it has taken over"


async def test_others_that_went_hold_nothing_up() -> None:
    bench = Bench([])
    bench.store.incompatible = (
        IncompatibleLease("d9", "decode", "speaks another wire version"),
        IncompatibleLease("p9", "prefill", "speaks another wire version"),
    )
    async with bench:
        await until(lambda: bench.nodes.registry_health.up)
        assert bench.cluster.trouble()
        bench.store.incompatible = (IncompatibleLease("p9", "prefill", "speaks another wire version"),)
        await until(lambda: not bench.cluster.trouble())
