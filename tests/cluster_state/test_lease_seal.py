"""Leases in the registry: known by name in every wire version, and believed only with the seal of their cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvferry.cluster_state import lease_seal
from kvferry.cluster_state.lease_seal import FORGOTTEN, LeaseSeal
from kvferry.cluster_state.redis_store import RedisStore
from kvferry.cluster_state.registry import LEASE_S, Announced, LeaseKeeper
from kvferry.cluster_state.seal import Seal
from kvferry.protocol.layout import WIRE_VERSION
from kvferry.protocol.lease import IncompatibleLease, NodeLease
from kvferry.protocol.wire import WireError, pack, unpack
from kvferry.runtime.cluster_secret import read_secrets
from tests.fake_workers import lease_of
from tests.redis_servers import RedisServer, free_ports
from tests.waiting import until

LEASE = lease_of("d1", "decode")
SECRET, OTHER = "the secret of this cluster", "the secret of another one"
KEY = "kvferry:test:node:d1"


def keys(*texts: str) -> Seal:
    return Seal(lambda: tuple(secret.registry for text in texts for secret in read_secrets(text)))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def leases(*texts: str, cluster: str = "test", clock: Clock | None = None) -> LeaseSeal:
    return LeaseSeal(cluster, keys(*texts), LEASE_S, clock or Clock())


@pytest.fixture
def server() -> Iterator[RedisServer]:
    server = RedisServer(free_ports(1)[0])
    yield server
    server.close()


def unverified(told: object) -> bool:
    return isinstance(told, IncompatibleLease) and "not authenticated" in told.why


@pytest.mark.parametrize("secrets", [(), (SECRET,)])
def test_a_lease_comes_back_as_it_was(secrets: tuple[str, ...]) -> None:
    here = leases(*secrets)
    assert here.unsealed(here.sealed(LEASE)) == LEASE


def test_what_another_version_wrote_is_known_by_name_whatever_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    here = leases()
    monkeypatch.setattr(lease_seal, "WIRE_VERSION", WIRE_VERSION + 1)
    later = here.sealed(LEASE)
    monkeypatch.undo()
    told = f"speaks wire version {WIRE_VERSION + 1} and this process {WIRE_VERSION}"
    assert here.unsealed(later) == IncompatibleLease("d1", "decode", told)
    told = f"speaks wire version 99 and this process {WIRE_VERSION}"
    odd = pack([99, "p1", "prefill", b"\xc1 no message of ours"])
    assert here.unsealed(odd) == IncompatibleLease("p1", "prefill", told)


def test_a_lease_without_its_version_is_an_older_one() -> None:
    told = f"speaks wire version 4 and this process {WIRE_VERSION}"
    assert leases().unsealed(pack(LEASE)) == IncompatibleLease("d1", "decode", told)


@pytest.mark.parametrize("secrets", [(), (SECRET,)])
@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", pack(1), pack([]), pack([WIRE_VERSION, "d1", "decode"]), pack([True, "d1", "decode", b""])],
)  # fmt: skip
def test_what_is_no_lease_is_refused(data: bytes, secrets: tuple[str, ...]) -> None:
    with pytest.raises(WireError):
        leases(*secrets).unsealed(data)


@pytest.mark.parametrize("packed", [b"", pack(5)])
def test_what_holds_no_lease_is_refused(packed: bytes) -> None:
    with pytest.raises(WireError):
        leases().unsealed(pack([WIRE_VERSION, "d1", "decode", packed]))


def test_nothing_in_a_sealed_lease_can_be_changed() -> None:
    sealed = leases(SECRET).sealed(LEASE)
    assert leases(SECRET).unsealed(sealed) == LEASE
    elsewhere = replace(LEASE, http_url="http://attacker:80")
    value = unpack(sealed)
    for changed in (
        [*value[:3], pack(elsewhere), *value[4:]],
        [value[0], "d2", *value[2:]],
        [*value[:2], "prefill", *value[3:]],
        [*value[:4], value[4] + 1, value[5]],
        [*value[:5], b""],
        [*value[:5], "text"],
        [*value, 0],
        [*value[:4], "now", value[5]],
        value[:5],
        value[:4],
        [*value[:3], pack(elsewhere)],
    ):
        assert unverified(leases(SECRET).unsealed(pack(changed))), changed[:3]


def test_every_flipped_bit_is_noticed() -> None:
    sealed = leases(SECRET).sealed(LEASE)
    for place in range(0, 8 * len(sealed), 7):
        data = bytearray(sealed)
        data[place // 8] ^= 1 << place % 8
        try:
            told = leases(SECRET).unsealed(bytes(data))
        except WireError:
            continue
        assert isinstance(told, IncompatibleLease), f"bit {place}"


def test_a_lease_of_another_cluster_or_secret_or_of_none_is_not_used() -> None:
    here = leases(SECRET)
    for other in (leases(OTHER), leases(SECRET, cluster="staging"), leases()):
        assert unverified(here.unsealed(other.sealed(LEASE)))
    assert leases().unsealed(here.sealed(LEASE)) == LEASE, "without a secret, all are believed"


def test_a_rotation_of_the_secret_loses_no_lease() -> None:
    """old → old, new → new, old → new, and each process may be one step ahead of another."""
    steps = [leases(SECRET), leases(SECRET, OTHER), leases(OTHER, SECRET), leases(OTHER)]
    for reader, writer in [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]:
        assert steps[reader].unsealed(steps[writer].sealed(LEASE)) == LEASE, (reader, writer)


def test_a_recorded_lease_written_again_is_known_as_old() -> None:
    clock, writer = Clock(), leases(SECRET)
    here = leases(SECRET, clock=clock)
    first, second = writer.sealed(LEASE), writer.sealed(LEASE)
    restarted = writer.sealed(replace(LEASE, epoch=LEASE.epoch + 1))
    for sealed in (first, second, restarted):
        assert isinstance(here.unsealed(sealed), NodeLease)
    for sealed in (first, second):
        assert here.unsealed(sealed) == IncompatibleLease("d1", "decode", "has an old lease that was written again")
    assert isinstance(here.unsealed(restarted), NodeLease)


def test_a_process_whose_clock_was_set_back_is_used_once_the_one_before_has_gone() -> None:
    """It had no lower epoch if the registry had not lost the epochs at the same time. Found by chaos: the node stayed
    away for minutes."""
    clock = Clock()
    here, before, after = leases(SECRET, clock=clock), leases(SECRET), leases(SECRET)
    recorded = before.sealed(LEASE)
    assert isinstance(here.unsealed(recorded), NodeLease)
    restarted = replace(LEASE, epoch=LEASE.epoch - 1)
    clock.now += LEASE_S
    assert isinstance(here.unsealed(after.sealed(restarted)), IncompatibleLease)
    clock.now += 0.1
    for _ in range(3):
        assert here.unsealed(after.sealed(restarted)) == restarted
        clock.now += 1.0


def test_a_lease_that_is_not_renewed_ends_also_where_the_registry_keeps_it() -> None:
    clock = Clock()
    here, sealed = leases(SECRET, clock=clock), leases(SECRET).sealed(LEASE)
    assert here.unsealed(sealed) == LEASE
    clock.now += 2 * LEASE_S
    assert here.unsealed(sealed) == LEASE
    clock.now += 0.1
    assert isinstance(here.unsealed(sealed), IncompatibleLease)
    assert here.unsealed(leases(SECRET).sealed(LEASE)) == LEASE, "it is renewed again"


def test_nodes_that_went_are_forgotten() -> None:
    clock = Clock()
    here = leases(SECRET, clock=clock)
    for number in range(50):
        here.unsealed(leases(SECRET).sealed(replace(LEASE, node_id=f"d{number}")))
        clock.now += FORGOTTEN * LEASE_S / 10
    assert len(here._latest) <= 12


async def test_a_writer_of_redis_cannot_redirect_a_node(server: RedisServer) -> None:
    """Without the seal the router read the attacker's address, and sent prompts there."""
    honest = RedisStore(server.url, "test", seal=keys(SECRET))
    router = RedisStore(server.url, "test", seal=keys(SECRET))
    attacker = RedisStore(server.url, "test")
    try:
        assert await honest.announce(LEASE) is Announced.CREATED
        with server.client() as client:
            recorded = client.get(KEY)
        assert await router.nodes() == [LEASE]
        await attacker.announce(replace(LEASE, http_url="http://attacker:80"))
        await attacker.announce(replace(LEASE, node_id="d2", http_url="http://attacker:80"))
        assert await router.nodes() == []
        assert {node.node_id for node in router.incompatible} == {"d1", "d2"}
        assert await honest.announce(LEASE) is Announced.RENEWED
        assert await router.nodes() == [LEASE]
        with server.client() as client:
            client.set(KEY, recorded)
        assert await router.nodes() == []
    finally:
        for store in (honest, router, attacker):
            await store.close()


async def test_a_node_of_another_secret_does_not_count_as_registered_where_it_reads_itself(server: RedisServer) -> None:
    """Its own seal is what it reads with, so the node is registered; whoever has the other secret names it."""
    node, router = (RedisStore(server.url, "test", seal=keys(text)) for text in (OTHER, SECRET))
    keeper = LeaseKeeper(node, lambda: LEASE, period_s=0.05)
    keeper.start()
    try:
        await until(lambda: keeper.held)
        assert await router.nodes() == []
        assert unverified(router.incompatible[0])
    finally:
        await keeper.stop()
        await node.close()
        await router.close()
