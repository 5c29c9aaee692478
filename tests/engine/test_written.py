"""What a prompt's account says was newly cached: full blocks whose content was nowhere in the pool before."""

from __future__ import annotations

from typing import Any

from kvferry.engine.engine import Engine
from kvferry.engine.events import Generated
from tests.toy import finish, make_engine, make_job

PROMPT = list(range(14))


def written(engine: Engine, name: str, tokens: list[int], **params: Any) -> int:
    engine.add(make_job(name, tokens, 1, **params))
    finish(engine)
    (reuse,) = [e.delta.reuse for e in engine.events if isinstance(e, Generated) and e.key[0] == name and e.delta.reuse]
    assert reuse.balanced
    return reuse.written


def test_full_blocks_are_written_once() -> None:
    engine = make_engine()
    assert written(engine, "cold", PROMPT) == 12
    assert written(engine, "again", PROMPT) == 0
    assert written(engine, "longer", [*PROMPT, *range(50, 60)]) == 12
    assert written(engine, "short", [90, 91]) == 0


def test_a_prompt_that_is_computed_again_writes_nothing_new() -> None:
    engine = make_engine()
    assert written(engine, "cold", PROMPT) == 12
    assert written(engine, "scored", PROMPT, prompt_logprobs=0) == 0


def test_without_a_prefix_cache_nothing_is_written() -> None:
    assert written(make_engine(caching=False), "cold", PROMPT) == 0
