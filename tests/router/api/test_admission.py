"""What a visit leaves in its tenant's accounts, however it ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvferry.protocol.errors import Cancelled, KvferryError, NoNodes
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.settings import RouterSettings
from kvferry.router.api.admission import AdmittedRequest, TokenUsage
from kvferry.router.request_context import RequestContext
from kvferry.router.tenants.keys import entry
from kvferry.router.tenants.scheduler_slots import SchedulerSlots, Size
from kvferry.router.tenants.tenant_registry import TenantRegistry
from kvferry.runtime.tracing import Span


def visit_of(folder: Path) -> AdmittedRequest:
    file = folder / "keys.toml"
    file.write_text(entry("a", "key") + "tokens_per_minute = 1000\n")
    now = time.monotonic()
    call = RequestContext("x", arrival=now, deadline=now + 60, tenant="a")
    return AdmittedRequest(call, TenantRegistry(RouterSettings(api_keys=str(file))), RouterMetrics(), Span(""))


def left(admitted: AdmittedRequest) -> int:
    return round(int(admitted.headers()["x-ratelimit-remaining-tokens"]), -1)


@pytest.mark.parametrize(
    ("error", "begins", "kept"),
    [
        (Cancelled("the client disconnected"), False, 690),
        (Cancelled("the client disconnected"), True, 680),
        (NoNodes("none"), False, 1000),
    ],
)
async def test_who_leaves_before_the_first_token_pays_for_the_prompt(
    tmp_path: Path, error: KvferryError, begins: bool, kept: int
) -> None:
    """And who is told of an error does not."""
    admitted = visit_of(tmp_path)

    async def pay() -> None:
        with admitted:
            await admitted.turn(SchedulerSlots(), Size(1, 300, 10))
            if begins:
                admitted.began(lambda: TokenUsage(300, 0, 20))
            raise error

    with pytest.raises(type(error)):
        await pay()
    assert left(admitted) == kept


async def test_who_leaves_while_it_waits_for_its_turn_pays_nothing(tmp_path: Path) -> None:
    admitted = visit_of(tmp_path)
    with pytest.raises(Cancelled), admitted:
        raise Cancelled("the client disconnected")
    assert left(admitted) == 1000
