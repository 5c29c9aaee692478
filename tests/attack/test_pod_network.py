"""Attacker: a peer on the pod network that reaches every port of the cluster and does not know its secret.

At most it reads the workers' status paths, and holds connections open for as long as a greeting may take."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

import kvferry
from kvferry.decode_worker.scale_out import api
from kvferry.decode_worker.scale_out.api import ABORTS
from kvferry.kv_transfer.control_stream import CHALLENGE, HEADER, HELLO, MESSAGE, REFUSED, WELCOME
from kvferry.kv_transfer.handshake import HandshakeTerms
from kvferry.protocol.lease import NodeLease
from kvferry.runtime.cluster_secret import OPEN, read_secrets
from tests.attack.attacked import MARKER, TENANTS, Attacked
from tests.kv_transfer.raw_client import Stranger, frame

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
HALF_OPEN = 200
WORK = (
    "/attempts/prefill", "/attempts/generate", "/attempts/move", "/attempts/cancel", "/adapters", "/role", "/sessions",
    "/leases", "/journals",
    "/attempts/render", "/attempts/transcribe", "/attempts/encode",
    "/streams/router-1", "/streams/router-1/seen", "/docs", "/openapi.json", "/redoc", "/unheard-of", "/",
    "/inference/v1/generate", "/v1/models", "/kv_event_sources", *ABORTS,
    "//attempts/cancel", "/health/../adapters", "/metrics/../role", "/health/", "/health%2f..%2fadapters",
)  # fmt: skip


def test_no_route_of_a_worker_works_without_the_token(attacked: Attacked) -> None:
    """At most: status paths, which name no tenant; everything else is 403, be there such a route or not."""
    for route in _routes_in_the_code() - OPEN:
        assert any(path.startswith(route) for path in WORK), f"{route} is new: attack it as well"
    token = read_secrets(attacked.secret)[0].token
    wrong = {"none": "", "the secret itself": attacked.secret, "a part": token[:-1], "more": token + "0"}
    for lease in attacked.cluster.leases():
        with httpx.Client(base_url=lease.http_url, trust_env=False, timeout=10) as client:
            for path in WORK:
                for method in ("GET", "POST", "DELETE", "OPTIONS"):
                    for shown in wrong.values():
                        answer = client.request(method, path, headers={"x-kvferry-cluster": shown}, content=b"\x80")
                        assert answer.status_code in (403, 400), (method, path, answer.status_code, answer.text)
            for path in OPEN:
                told = client.get(path).text
                assert not [word for word in (*TENANTS, *attacked.secrets, MARKER.split()[2]) if word in told]
            known = client.post("/role", headers={"x-kvferry-cluster": token}, content=b"\x80")
            assert known.status_code != 403, "the right token is told from wrong ones"


def test_a_recorded_handshake_opens_no_link(attacked: Attacked) -> None:
    """At most: a refusal in words. The recording is of a member's own handshake, byte for byte."""
    terms = HandshakeTerms(lambda: (read_secrets(attacked.secret)[0].link,), _terms(attacked))
    for lease in attacked.cluster.leases():
        member = Stranger(lease.link_address, terms)
        hello = member.hello()
        member.raw(frame(HELLO, hello))
        assert (member.next() or (0,))[0] == WELCOME, "a member is let in"
        member.close()
        for late in (hello, hello[: len(hello) // 2], bytes(reversed(hello))):
            thief = Stranger(lease.link_address)
            thief.read_challenge()
            thief.raw(frame(HELLO, late) + frame(MESSAGE, MARKER.encode()))
            answer = None
            with suppress(ConnectionError):
                answer = thief.next()
            assert answer is None or answer[0] == REFUSED
            assert thief.ended(5)
            thief.close()


def test_a_welcome_cannot_be_reflected(attacked: Attacked) -> None:
    """At most: the challenge, which holds nothing but random bytes."""
    first, second = attacked.cluster.leases()
    one, other = Stranger(first.link_address), Stranger(second.link_address)
    kind, challenge = one.next() or (0, b"")
    assert kind == CHALLENGE
    other.raw(frame(HELLO, challenge + b"\0" * 64))
    one.raw(frame(CHALLENGE, challenge))
    assert one.ended(5)
    assert other.ended(5)


def test_two_hundred_half_open_connections_disturb_nobody(attacked: Attacked) -> None:
    """At most: 200 descriptors for as long as a greeting may take. Answers are the same meanwhile, and in time."""
    attacked.tokens()
    began = time.monotonic()
    attacked.goes_on()
    usual = time.monotonic() - began
    draw = random.Random(5)
    with _strangers(attacked.cluster.leases(), HALF_OPEN, draw), _slow_heads(attacked):
        began = time.monotonic()
        attacked.goes_on()
        attacked.says(MARKER, TENANTS[0])
        assert time.monotonic() - began < 20 + 10 * usual
        for lease in attacked.cluster.leases():
            assert httpx.get(f"{lease.http_url}/health", timeout=10).status_code == 200
    assert not [line for line in attacked.cluster.log if "Traceback" in line or "never retrieved" in line]
    said = [line for line in attacked.cluster.log if "is rejected" in line]
    assert len(said) < 60, "strangers do not fill the log"


@contextmanager
def _strangers(leases: list[NodeLease], count: int, draw: random.Random) -> Iterator[None]:
    """To every link: silent ones, garbage, greetings that stop halfway, lengths that never come."""
    with ExitStack() as stack:
        for number in range(count):
            stranger = Stranger(leases[number % len(leases)].link_address)
            stack.callback(stranger.close)
            match number % 4:
                case 1:
                    stranger.raw(draw.randbytes(draw.choice((1, 9, 100, 5000))))
                case 2:
                    stranger.raw(HEADER.pack(HELLO, 400) + draw.randbytes(41))
                case 3:
                    stranger.raw(HEADER.pack(draw.choice((HELLO, MESSAGE)), (1 << 32) - 1))
        yield


@contextmanager
def _slow_heads(attacked: Attacked) -> Iterator[None]:
    """To every worker's HTTP port: 50 requests that never end."""
    with ExitStack() as stack:
        for lease in attacked.cluster.leases():
            address = lease.http_url.removeprefix("http://")
            for number in range(50):
                stranger = Stranger(address)
                stack.callback(stranger.close)
                body = "POST /attempts/cancel HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
                stranger.raw(b"GET /health HTT" if number % 2 else body.encode())
        yield


def _terms(attacked: Attacked) -> dict[str, str]:
    from kvferry.kv_transfer.checksum import ALGORITHM

    return {"checksums": ALGORITHM}


def _routes_in_the_code() -> set[str]:
    """Paths of a worker, so that a new one is attacked as well."""
    found: set[str] = set(ABORTS)
    root = Path(kvferry.__file__).parent
    for room in ("worker", "prefill_worker", "encode_worker", "decode_worker", "elastic_worker"):
        for file in (root / room).rglob("*.py"):
            for named in re.findall(r"app\.(?:get|post|put|delete)\(([^,)]+)", file.read_text()):
                if named != "path":  # in a loop over ABORTS
                    literal = named if named.startswith('"') else repr(getattr(api, named))
                    found.add(literal.strip("\"'").partition("{")[0])
    assert found >= {"/role", api.GENERATE}
    return found
