"""Texts that make vLLM ban exactly the sequences of tokens that a request bans."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.engine_adapter.engine import EngineCall, EngineDelta
from kvferry.engine_adapter.engines.vllm import VllmEngine
from kvferry.engine_adapter.engines.vllm_bad_words import BadWordTexts
from kvferry.protocol.errors import InvalidRequest, StepFailed
from kvferry.protocol.sampling import SamplingParams
from kvferry.router.text.bad_words import bad_word_ids
from kvferry.router.text.text_model import TextModel
from tests.engine_adapter.mock_tokenizer import encoded, tokenizer


class Server:
    """A server's tokenizer, and its token interface."""

    def __init__(self, *, has_tokenizer: bool = True) -> None:
        self.asked, self.generated, self._has = 0, dict[str, Any](), has_tokenizer

    async def post(self, path: str, body: dict[str, Any], silence_s: float | None = 1.0) -> Any:
        self.asked += 1
        if not self._has:
            raise StepFailed("the engine answered 404")
        if path == "/tokenize":
            return {"tokens": encoded(body["prompt"])}
        return {"prompt": tokenizer().decode(body["tokens"])}

    async def stream(self, path: str, body: dict[str, Any], deliver: Any) -> None:
        self.generated = body
        deliver({"choices": [{"index": 0, "token_ids": [7], "finish_reason": "length"}]})


def sequences(*words: str) -> tuple[tuple[int, ...], ...]:
    """What the router makes of a client's words."""

    class Text:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return encoded(text)

    made: TextModel = Text()  # type: ignore[assignment]
    return bad_word_ids(words, made)


def texts(server: Server) -> BadWordTexts:
    return BadWordTexts(server, lambda: "toy")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "words", [("hello",), (" hello",), ("hello", "world"), ("extraordinarily odd",), ("!",), ("été", "x"), ("a", " a")]
)
async def test_texts_ban_what_the_router_bans(words: tuple[str, ...]):
    due = sequences(*words)
    found = await texts(Server()).of(due)
    assert set(sequences(*found)) == set(due)


async def test_known_texts_are_not_asked_for_again():
    server = Server()
    known = texts(server)
    first = await known.of(sequences("hello"))
    asked = server.asked
    assert await known.of(tuple(reversed(sequences("hello")))) == first
    assert server.asked == asked > 0


async def test_a_sequence_that_no_text_gives_is_refused_by_name():
    bare, *rest = sequences("hello")
    assert rest, "the word has a form with a space, which its text bans, too"
    for due in ((bare,), ((encoded("hel")[0], encoded("lo")[0]),), ((0,),)):
        with pytest.raises(InvalidRequest, match="bad_words") as refused:
            await texts(Server()).of(due)
        assert refused.value.param == "bad_words"


async def test_a_server_without_a_tokenizer_refuses_by_name():
    with pytest.raises(InvalidRequest, match="bad_words"):
        await texts(Server(has_tokenizer=False)).of(sequences("hello"))


async def test_a_call_carries_the_texts():
    server, deltas = Server(), list[EngineDelta]()
    engine = VllmEngine(server)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=1, bad_words=sequences("hello"))
    await engine.generate(EngineCall("r-0-1", (1, 2), params), deltas.append)
    assert server.generated["sampling_params"]["bad_words"] == ("hello",)
    assert [delta.token_ids for delta in deltas] == [(7,)]
    server.generated.clear()
    with pytest.raises(InvalidRequest, match="bad_words"):
        await engine.generate(EngineCall("r-0-2", (1, 2), SamplingParams(bad_words=((0,),))), deltas.append)
    assert server.generated == {}
