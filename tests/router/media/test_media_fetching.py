"""Fetching of media: allowed hosts at public addresses only, each address checked and then used, within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.media import fetching
from kvferry.router.media.addresses import is_public
from kvferry.router.media.fetching import MediaFetcher
from kvferry.router.media.limits import MAX_MEDIA_BYTES, MAX_REDIRECTS
from kvferry.runtime.address import resolve
from tests.api_parts import served

HOST, FIELD = "pictures.example", "messages[0].content[0].image_url.url"
asked: list[str] = []


async def picture(request: Request) -> Response:
    asked.append(request.headers["host"])
    return Response(b"picture", media_type="image/png")


async def redirect(request: Request) -> Response:
    return RedirectResponse(request.query_params["to"])


async def endless(request: Request) -> Response:
    async def parts() -> Any:
        while True:
            yield b"\0" * 2**20
            await asyncio.sleep(0)

    return StreamingResponse(parts())


async def packed(request: Request) -> Response:
    return Response(b"x", headers={"content-encoding": "gzip"})


async def declared(request: Request) -> Response:
    return Response(b"x", headers={"content-length": str(MAX_MEDIA_BYTES + 1)})


async def slow(request: Request) -> Response:
    await asyncio.sleep(5)
    return Response(b"x")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    paths = {"/a.png": picture, "/to": redirect, "/endless": endless, "/packed": packed, "/declared": declared,
             "/slow": slow}  # fmt: skip
    with served(Starlette(routes=[Route(path, each) for path, each in paths.items()])) as url:
        yield int(url.rpartition(":")[2])


class Names:
    """A name server: the addresses of each host, one list an answer; the last one is repeated."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self.answers, self.asked = answers, 0

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked += 1
        found = self.answers[host.partition(".")[0]]
        return found.pop(0) if len(found) > 1 else found[0]


def fetcher(port: int, names: Names, *hosts: str) -> MediaFetcher:
    """Fetches from a server of this machine as if it were elsewhere."""
    return MediaFetcher(hosts or (HOST,), names, allowed=lambda address: address == "127.0.0.1", ports={"http": port})


async def refusal(each: MediaFetcher, url: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await each.fetch(url, FIELD)
    assert caught.value.param == FIELD
    await each.close()
    return caught.value.message


async def test_an_allowed_host_is_asked_by_its_name_at_the_address_that_was_checked(port: int):
    asked.clear()
    names = Names(pictures=[["127.0.0.1"], ["10.0.0.1"]])
    each = fetcher(port, names)
    assert await each.fetch(f"http://{HOST}/a.png", FIELD) == (b"picture", "image/png")
    assert asked == [f"{HOST}:{port}"]
    assert names.asked == 1
    assert "not public" in await refusal(each, f"http://{HOST}/a.png")
    assert len(asked) == 1


async def test_one_private_address_among_several_is_enough_to_refuse(port: int):
    each = fetcher(port, Names(pictures=[["127.0.0.1", "10.0.0.1"]]))
    assert "not public" in await refusal(each, f"http://{HOST}/a.png")


@pytest.mark.parametrize(
    ("to", "why"),
    [
        ("http://pictures.example/to?to=/to?to=/a.png", ""),
        ("http://169.254.169.254/latest/meta-data", "not in --allowed-media-domains"),
        ("http://inside.example/a.png", "not public"),
        ("ftp://pictures.example/a.png", "http or https"),
        ("file:///etc/passwd", "http or https"),
        ("/to?to=/to?to=/to?to=/to?to=/a.png", f"more than {MAX_REDIRECTS} times"),
    ],
)
async def test_each_redirect_is_checked_like_the_first_url(port: int, to: str, why: str):
    each = fetcher(port, Names(pictures=[["127.0.0.1"]], inside=[["10.0.0.1"]]), HOST, "inside.example")
    url = f"http://{HOST}/to?to={to.replace('?', '%3F').replace('=', '%3D')}"
    if why:
        assert why in await refusal(each, url)
    else:
        assert (await each.fetch(url, FIELD))[0] == b"picture"
        await each.close()


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("endless", f"more than {MAX_MEDIA_BYTES} bytes"),
        ("declared", f"more than {MAX_MEDIA_BYTES} bytes"),
        ("packed", "compressed"),
        ("missing", "status 404"),
        ("slow", "not fetched within 0.5 s"),
    ],
)
async def test_answers_are_bounded(port: int, path: str, why: str, monkeypatch: pytest.MonkeyPatch):
    if path == "slow":
        monkeypatch.setattr(fetching, "FETCH_S", 0.5)
    assert why in await refusal(fetcher(port, Names(pictures=[["127.0.0.1"]])), f"http://{HOST}/{path}")


async def test_a_host_that_does_not_answer_is_refused():
    (closed,) = fetching.PORTS.keys() - {"https"}
    each = MediaFetcher((HOST,), Names(pictures=[["127.0.0.1"]]), allowed=lambda address: True, ports={closed: 1})
    assert "cannot be fetched: ConnectError" in await refusal(each, f"http://{HOST}/a.png")


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/", "http://localhost/", "http://169.254.169.254/latest/meta-data/", "http://[::1]/",
        "http://[::ffff:127.0.0.1]/", "http://0x7f.1/", "http://2130706433/",
    ],
)  # fmt: skip
async def test_addresses_of_this_machine_and_its_network_are_refused_even_where_their_names_are_allowed(url: str):
    host = url.removeprefix("http://").rstrip("/").partition("/")[0].strip("[]")
    stranger, trusting = MediaFetcher((HOST,)), MediaFetcher((HOST, host))
    assert "not in --allowed-media-domains" in await refusal(stranger, url)
    assert "not public" in await refusal(trusting, url)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (f"http://{HOST}@127.0.0.1/", "not in --allowed"),
        (f"http://{HOST}.evil.example/", "not in --allowed"),
        (f"http://evil.example#@{HOST}/", "not in --allowed"),
        (f"http://evil.example\\@{HOST}/", "neither a user"),
        (f"http://me:secret@{HOST}/", "neither a user"),
        (f"http://{HOST}:6379/", "nor a port"),
        (f"http://{HOST}:99999/", "not a valid URL"),
        (f"gopher://{HOST}/", "http or https"),
        (f"//{HOST}/", "http or https"),
        ("http://", "http or https"),
        (f"http://{HOST}/{'a' * 5000}", "longer than 4096"),
        ("http://exa\tmple/", "URL"),
    ],
)
async def test_urls_that_hide_their_host_are_refused(url: str, why: str):
    assert why in await refusal(MediaFetcher((HOST,), Names(pictures=[["127.0.0.1"]])), url)


@pytest.mark.parametrize(
    "address",
    [
        "192.88.99.1", "::ffff:0:a00:1",
        "0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "127.255.255.254", "169.254.169.254", "172.16.0.1",
        "192.168.1.1", "192.0.0.8", "198.18.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "::", "::1",
        "::127.0.0.1", "::ffff:10.0.0.1", "::ffff:8.8.8.8", "64:ff9b::a00:1", "64:ff9b:1::1", "2002:7f00:1::",
        "2001:0:1::1", "fc00::1", "fd00::1", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1",
    ],
)  # fmt: skip
def test_an_address_that_is_not_one_public_machine(address: str):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111"])
def test_a_public_address(address: str):
    assert is_public(address)


async def test_names_of_this_machine_are_resolved_to_what_they_are():
    found = await resolve("localhost", 80)
    assert found
    assert not any(map(is_public, found))
    with pytest.raises((OSError, UnicodeError)):
        await resolve("no." + "x" * 70 + ".example", 80)
