"""Tiny hybrid models in an engine: transformers' own tokens in any company, from checkpoints and after a transfer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvferry.cli.model_report import model_report
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.budget import Limits
from kvferry.engine.engine import Engine, EngineConfig
from kvferry.engine.events import Computed, Generated, Reserved
from kvferry.engine.ledger import Ledger
from kvferry.engine.models import load_model
from kvferry.engine.models.base import Model
from kvferry.engine.runner import Runner
from kvferry.engine.state_memory import StateMemory, make_rows
from kvferry.engine.state_rows import ROWS
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.memory_needs import model_needs
from kvferry.model_files.source import resolve
from kvferry.protocol.settings import ServeSettings
from tests.engine.tiny_hybrids import HYBRIDS
from tests.engine.tiny_models import save_tiny, tokens_for, transformers
from tests.toy import finish, make_job, runner_of, tokens_of

BLOCK = 8
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = ("lfm2", "qwen3.5", "granite4", "falcon-h1", "jamba", "minimax", "nemotron-3")


def engine_of(model: Model, num_blocks: int = 120) -> Engine:
    kv = torch.zeros(num_blocks, *model.info.layout(torch.float32, BLOCK).block_shape)
    states = StateMemory(make_rows(ROWS * 9, model.info.state_floats, CPU), kv)
    config = EngineConfig("tiny", BLOCK, 128, Limits(48, 24, 8), state_stride=4)
    return Engine(config, Runner(model, kv, BLOCK, states=states), BlockPool(num_blocks, Ledger(num_blocks)))


def greedy(path: Path, prompt: list[int], count: int) -> list[int]:
    """Transformers' own tokens, by a whole pass for each."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
            best = logits.topk(2).values
            assert best[0] - best[1] > 1e-3, "a near tie: take another seed"
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    save_tiny(HYBRIDS[name](), tmp_path)
    model = load_model(resolve(str(tmp_path)), device=CPU, dtype=torch.float32, ops=ReferenceOps(), impl="kvferry")
    prompts = {str(length): tokens_for(length, length).tolist() for length in (11, 37, 58)}
    wanted = {each: greedy(tmp_path, prompt, 10) for each, prompt in prompts.items()}
    engine = engine_of(model)
    for each, prompt in prompts.items():
        engine.add(make_job(each, prompt, 10))
        engine.step()
    engine.scheduler.preempt(engine.request_table.running[0])
    finish(engine)
    assert {each: tokens_of(engine, each) for each in prompts} == wanted
    assert engine.states is not None
    loaded = engine.states.loaded_total
    for each in ("37", "58"):
        engine.add(make_job(f"{each} again", prompts[each], 10))
    finish(engine)
    assert engine.states.loaded_total == loaded + 2
    assert {each: tokens_of(engine, f"{each} again") for each in ("37", "58")} == {e: wanted[e] for e in ("37", "58")}
    for each in ("37", "58"):
        _through_a_ship(engine, engine_of(model), prompts[each], wanted[each], each)


@pytest.mark.parametrize("name", HYBRIDS)
def test_needs_are_told_from_the_config_as_the_loaded_model_has_them(name: str, tmp_path: Path) -> None:
    save_tiny(HYBRIDS[name](), tmp_path)
    source = resolve(str(tmp_path))
    model = load_model(source, device=CPU, dtype=torch.float32, ops=ReferenceOps(), impl="kvferry")
    needs = model_needs(source)
    assert needs.layout("float32", BLOCK) == model.info.layout(torch.float32, BLOCK)
    assert needs.state_bytes == 4 * model.info.state_floats > 0


def test_the_doctor_says_what_a_state_takes(tmp_path: Path) -> None:
    save_tiny(HYBRIDS["qwen3.5"](), tmp_path)
    text = model_report(ServeSettings(model=(str(tmp_path),)), resolve(str(tmp_path)))
    assert "recurrent state 0.01 MiB a checkpoint, 3 times that a running request" in text
    assert "canaries" not in text, "they check recurrent states, too"


def _through_a_ship(prefill: Engine, decode: Engine, prompt: list[int], wanted: list[int], name: str) -> None:
    """Computed on one engine, from a checkpoint, and continued on another."""
    job = make_job(f"{name} shipped", prompt, 10)
    decode.reserve("g", job)
    decode.stepper.admit_grants()
    (grant,) = [event for event in decode.events if isinstance(event, Reserved)]
    prefill.add(job, transfer=1, first_block=0, prefill_only=True)
    finish(prefill)
    (first,) = [e for e in prefill.events if isinstance(e, Generated) and e.handover == 1]
    for event in prefill.events:
        if isinstance(event, Computed):
            for index, ours in event.blocks:
                runner_of(decode).kv[grant.block_ids[index]] = runner_of(prefill).kv[ours]
    decode.start("g", first.delta)
    prefill.transfer_holds.ship_quiet(1)
    prefill.events.clear()
    finish(decode)
    assert [*first.delta.token_ids, *tokens_of(decode, f"{name} shipped")] == wanted
