"""A node with a cluster secret: strangers get its health, members its work; over HTTP and over the link."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from kvferry.kv_transfer.checksum import ALGORITHM
from kvferry.kv_transfer.control_stream import REFUSED, WELCOME
from kvferry.kv_transfer.handshake import HandshakeTerms
from kvferry.protocol.errors import OtherCluster
from kvferry.protocol.messages import CancelRequest
from kvferry.router.nodes.client import NodeClient
from kvferry.runtime.cluster_secret import read_secrets
from tests.kv_transfer.raw_client import Stranger
from tests.toy import make_engine
from tests.worker_pair import worker

SECRET = "0123456789abcdef"
TERMS = {"checksums": ALGORITHM}


async def test_a_node_answers_members_only():
    async with worker("decode", make_engine(), cluster_secret=SECRET) as node:
        lease = node.loaded.lease()
        async with httpx.AsyncClient(trust_env=False, base_url=lease.http_url) as http:
            for path in ("/health", "/ready", "/metrics", "/version"):
                assert (await http.get(path)).status_code == 200
            for method, path in (("GET", "/streams/x"), ("POST", "/attempts/generate"), ("POST", "/adapters")):
                assert (await http.request(method, path)).status_code == 403
        cancel = CancelRequest("r", 1)
        with pytest.raises(OtherCluster, match="secret"):
            await NodeClient("router").cancel(lease, cancel)
        with pytest.raises(OtherCluster, match="secret"):
            await NodeClient("router", lambda: "wrong").cancel(lease, cancel)
        client = NodeClient("router", lambda: read_secrets(SECRET)[0].token)
        await client.cancel(lease, cancel)
        await client.aclose()


@pytest.mark.parametrize(
    ("secret", "settings", "reason"),
    [
        ("", TERMS, b"cluster secret"),
        ("another secret of the like", TERMS, b"cluster secret"),
        (SECRET, {"checksums": "off"}, b"checksums differs"),
        (SECRET, TERMS, None),
    ],
)
async def test_a_link_takes_members_with_the_same_settings_only(secret, settings, reason):
    async with worker("decode", make_engine(), cluster_secret=SECRET) as node:
        terms = HandshakeTerms(lambda: (read_secrets(secret)[0].link if secret else b"",), settings)
        stranger = Stranger(node.loaded.link.address, terms)
        kind, data = await asyncio.to_thread(stranger.greet) or (None, b"")
        assert kind == (REFUSED if reason else WELCOME)
        assert reason is None or reason in data
        stranger.close()
