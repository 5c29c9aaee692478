"""What probes of a running cluster tell, asked of one that is arithmetic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import httpx
import pytest
from click.testing import CliRunner

from kvferry.cli.main import kvferry
from kvferry.protocol.errors import ConfigError
from kvferry.simulate import rate_probe
from kvferry.simulate.machine import Machine
from kvferry.simulate.rate_probe import Answered, ProbeClient, fitted, lines, share

OVERHEAD_S, TOKEN_S, STEP_S, STREAM_S, BESIDE = 0.012, 0.0005, 0.02, 0.004, 0.8
PLAIN = Machine(attention_len=0)


class Arithmetic(ProbeClient):
    """Answers at once, as if its rates had been spent."""

    streams = 0

    async def ask(self, prompt: Sequence[int], output: int) -> Answered:
        beside = Arithmetic.streams > 0
        Arithmetic.streams += 1
        try:
            await asyncio.sleep(10 if output == rate_probe.BESIDE_TOKENS else 0.001)
            between_s = STEP_S + STREAM_S * (Arithmetic.streams - 1)
        finally:
            Arithmetic.streams -= 1
        compute_s = TOKEN_S * len(prompt) / (BESIDE if beside else 1)
        return Answered(OVERHEAD_S + compute_s, between_s)


async def test_a_machine_is_what_its_cluster_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: list[int] = []
    answer = Arithmetic.ask

    async def ask(self: Arithmetic, prompt: Sequence[int], output: int) -> Answered:
        at_once.append(Arithmetic.streams)
        return await answer(self, prompt, output)

    monkeypatch.setattr(Arithmetic, "ask", ask)
    machine = await rate_probe._probe(Arithmetic("", "m", 2048, None), PLAIN)  # type: ignore[arg-type]
    assert machine.overhead_s == pytest.approx(OVERHEAD_S)
    assert machine.prefill_tokens_per_s == pytest.approx(1 / TOKEN_S)
    assert machine.beside == pytest.approx(BESIDE)
    assert machine.decode_s(1, 0) == pytest.approx(STEP_S)
    assert machine.stream_s > 0
    assert max(at_once) == rate_probe.STREAMS - 1
    assert Arithmetic.streams == 0


def test_a_line_through_the_probes_has_attentions_share() -> None:
    machine = Machine(prefill_tokens_per_s=2000.0, attention_len=1000)
    alone_s = {length: 0.01 + machine.compute_s(0, length) for length in (64, 320, 768)}
    assert fitted(alone_s, machine) == pytest.approx((0.01, 2000.0))


def test_no_request_costs_less_than_nothing_and_its_line_still_lies_between_the_probes() -> None:
    overhead_s, rate = fitted({100: 0.09, 300: 0.3, 700: 0.77}, PLAIN)
    assert overhead_s == 0.0
    assert rate == pytest.approx((100**2 + 300**2 + 700**2) / (9 + 90 + 539))


def test_a_cluster_that_is_busy_tells_nothing() -> None:
    with pytest.raises(ConfigError, match="took no longer"):
        fitted({64: 0.5, 320: 0.4, 768: 0.3}, PLAIN)


@pytest.mark.parametrize(
    ("alone_s", "beside_s", "kept"),
    [(0.51, 1.01, 0.5), (0.51, 0.52, 1.0), (0.51, 0.4, 1.0), (0.51, 100.0, rate_probe.MIN_SHARE)],
    ids=["half", "cores of its own", "luck", "hardly any"],
)
def test_what_prompts_keep_beside_streams(alone_s: float, beside_s: float, kept: float) -> None:
    assert share(alone_s, beside_s, 0.01) == pytest.approx(kept)


async def test_what_ends_a_line_in_text_ends_none_of_a_stream() -> None:
    async def body() -> AsyncIterator[bytes]:
        for data in ("data: {\u2028\x85", "\x1d}\n\nda", "ta: [DO", "NE]\n"):
            yield data.encode()

    found = [line async for line in lines(httpx.Response(200, content=body()))]
    assert found == ["data: {\u2028\x85\x1d}".encode(), b"", b"data: [DONE]"]


def test_who_cannot_be_asked_is_named() -> None:
    words = ["simulate", "--workload", "bursts", "--requests", "10", "--probe", "http://127.0.0.1:9"]
    result = CliRunner().invoke(kvferry, words)
    assert isinstance(result.exception, ConfigError)
    assert "http://127.0.0.1:9 cannot be probed" in str(result.exception)
