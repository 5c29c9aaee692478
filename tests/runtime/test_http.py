"""What any process's HTTP server does with a message."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import Request

from kvferry.protocol.errors import Cancelled, InvalidRequest, KvferryError
from kvferry.protocol.messages import CancelRequest
from kvferry.protocol.wire import pack
from kvferry.runtime.http import read_message


def request(*received: dict[str, Any]) -> Request:
    told = list(received)

    async def receive() -> Any:
        return told.pop(0)

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


def body(data: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


async def test_a_message_is_read_whole() -> None:
    message = CancelRequest("r", 1)
    data = pack(message)
    assert await read_message(request(body(data[:3], more=True), body(data[3:])), CancelRequest) == message


@pytest.mark.parametrize(
    ("received", "error"),
    [
        ([body(b"\x01")], KvferryError),
        ([body(pack(CancelRequest("r", 1)))], InvalidRequest),
        ([body(b"\x01", more=True), {"type": "http.disconnect"}], Cancelled),
    ],
)
async def test_what_is_no_message_is_an_error_of_ours(received: list[dict[str, Any]], error: type[Exception]) -> None:
    with pytest.raises(error):
        await read_message(request(*received), str)
