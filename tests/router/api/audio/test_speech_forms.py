"""Multipart forms of audio: read as clients write them, refused by name beyond their bounds."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from kvferry.engine_adapter.engines.vllm_media import form_data
from kvferry.protocol.errors import InvalidRequest
from kvferry.router.api.audio.body import speech_body
from kvferry.router.api.audio.form import MAX_FIELDS, MAX_VALUE_BYTES, read_form

FILE = b"\r\n--boundary\r\n" * 5 + bytes(range(256)) * 300


def written(fields: dict[str, Any], **files: Any) -> bytes:
    return httpx.Request("POST", "http://x", data=fields, files=files or {"file": ("a.wav", FILE)}).read()


async def test_a_clients_form_is_read():
    form = await read_form(written({"model": "m", "language": "en", "timestamp_granularities[]": ["word", "segment"]}))
    assert (form.file, form.filename) == (FILE, "a.wav")
    assert form.fields == {"model": ["m"], "language": ["en"], "timestamp_granularities[]": ["word", "segment"]}


async def test_what_the_adapter_writes_is_read_again():
    data, kind = form_data([("model", "a/b"), ("prompt", 'quote " and\r\nline')], 'odd "name"\r\n.wav', FILE)
    form = await read_form(data)
    assert kind.startswith("multipart/form-data; boundary=")
    assert (form.file, form.filename) == (FILE, "odd %22name%22%0D%0A.wav")
    assert form.fields == {"model": ["a/b"], "prompt": ['quote " and\r\nline']}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "must be a multipart form"),
        (b'{"file": 1}', "must be a multipart form"),
        (b"--x\r\n", "cut off"),
        (b"--x\r\nno header\r\n\r\n", "cannot be read"),
        (written({})[:-8], "cut off"),
        (written({f"f{at}": "x" for at in range(MAX_FIELDS)}), f"at most {MAX_FIELDS} fields"),
        (written({"prompt": "x" * (MAX_VALUE_BYTES + 1)}), "prompt has more than 65536 bytes"),
        (written({}, file=("a" * 5000, b"")), "headers of a field have more|[Hh]eader (size|count) exceeded"),
        (written({}, other=("a.wav", b"")), "one file, named file"),
        (
            b"--x\r\n" + b"a: b\r\n" * 2000 + b"\r\n\r\n--x--\r\n",
            "headers of a field have more|[Hh]eader (size|count) exceeded",
        ),
    ],
)
async def test_a_form_beyond_its_bounds_is_refused(data: bytes, why: str):
    with pytest.raises(InvalidRequest, match=why):
        await read_form(data)


async def test_two_files_are_refused():
    first, second = written({}), written({})
    line = first.split(b"\r\n", 1)[0]
    second = second.replace(second.split(b"\r\n", 1)[0], line)
    with pytest.raises(InvalidRequest, match="one file"):
        await read_form(first.rsplit(line + b"--", 1)[0] + second)


async def test_fields_reach_an_engine_by_name_alone():
    given = {"model": "m", "language": "en", "temperature": "0.5", "stream": "true", "stream_include_usage": "1",
             "response_format": "verbose_json", "timestamp_granularities[]": ["word"], "vllm_xargs": "{}", "n": "9",
             "prompt": ""}  # fmt: skip
    body = speech_body(await read_form(written(given)))
    assert body.model == "m"
    assert body.fields() == (
        ("language", "en"), ("response_format", "verbose_json"), ("temperature", "0.5"), ("stream", "true"),
        ("stream_include_usage", "true"), ("timestamp_granularities[]", "word"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"temperature": "3"}, "temperature"),
        ({"response_format": "xml"}, "response_format"),
        ({"stream": "perhaps"}, "stream"),
        ({"language": "x" * 33}, "language"),
        ({"language": ["en", "de"]}, "language"),
        ({"timestamp_granularities[]": ["hour"]}, "timestamp_granularities[][0]"),
        ({"timestamp_granularities[]": ["word"] * 3}, "timestamp_granularities[]"),
        ({"model": "m" * 300}, "model"),
        ({"include[]": ["logprobs"]}, "include"),
        ({"include": "logprobs"}, "include"),
    ],
)
async def test_a_wrong_field_is_named(fields: dict[str, Any], param: str):
    with pytest.raises(InvalidRequest) as caught:
        speech_body(await read_form(written(fields)))
    assert caught.value.param == param
