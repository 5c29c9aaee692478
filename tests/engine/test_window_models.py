"""Tiny models whose layers live for different times: their tokens are those of the model with one kind of block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch

from kvferry.cli.model_report import model_report
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.budget import Limits
from kvferry.engine.engine import Engine, EngineConfig
from kvferry.engine.ledger import Ledger
from kvferry.engine.media.encoder import Ready
from kvferry.engine.models import load_model
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.models.decoder_form import decoder_form
from kvferry.engine.models.layer_lifetimes import divide_layers, groups_of
from kvferry.engine.runner import Runner
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.cuda_graphs import GraphStep
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.source import resolve
from kvferry.protocol.media import MediaItem
from kvferry.protocol.settings import ServeSettings
from tests.engine.carrying import Ship
from tests.engine.tiny_models import OURS, save_tiny, tokens_for
from tests.kernels.test_graph_states import replayed
from tests.media_parts import FakeEncoder, media_job, prompt_of
from tests.toy import finish, make_job, tokens_of

BLOCK = 4
CPU = torch.device("cpu")
DIVIDED = {"gemma2": 1, "gemma3": 1, "gpt-oss": 1, "cohere2": 3, "cohere2-pattern": 2, "olmo3": 2, "llama4": 3}
"""Groups of layers with windows, by tiny family."""
pytestmark = pytest.mark.usefixtures("one_thread")


def saved(name: str, path: Path, ops: Ops, dtype: torch.dtype = torch.float32) -> tuple[Decoder, Decoder]:
    """The model with one kind of block, and divided."""
    if not path.joinpath("config.json").exists():
        save_tiny(OURS[name](), path)
    whole, divided = (
        cast(Decoder, load_model(resolve(str(path)), device=CPU, dtype=dtype, ops=ops, impl="kvferry")) for _ in "ab"
    )
    divide_layers(divided)
    return whole, divided


def engine_of(
    model: Decoder,
    num_blocks: int = 160,
    kv_dtype: torch.dtype | None = None,
    budget: int = 32,
    encoder: FakeEncoder | None = None,
) -> Engine:
    layout = model.info.layout(kv_dtype or model.dtype, BLOCK)
    kv = torch.zeros(num_blocks, *layout.block_shape, dtype=kv_dtype or model.dtype)
    config = EngineConfig("tiny", BLOCK, 128, Limits(budget, 16, 8))
    pool = BlockPool(num_blocks, Ledger(num_blocks))
    return Engine(config, Runner(model, kv, BLOCK), pool, None, encoder, RowsAtOnce(encoder) if encoder else None)


PROMPTS = {str(length): tokens_for(length, length).tolist() for length in (11, 37, 58)}


def together(engine: Engine, suffix: str = "", preempted: bool = True) -> dict[str, list[int]]:
    """The tokens of prompts that are computed in chunks, side by side."""
    for each, prompt in PROMPTS.items():
        engine.add(make_job(each + suffix, prompt, 24))
        engine.step()
    if preempted:
        engine.scheduler.preempt(engine.request_table.running[0])
    finish(engine)
    return {each: tokens_of(engine, each + suffix) for each in PROMPTS}


@pytest.mark.parametrize("name", DIVIDED)
def test_tokens_are_those_of_one_kind_of_block(name: str, tmp_path: Path) -> None:
    whole, divided = saved(name, tmp_path, ReferenceOps())
    assert divided.info.groups is not None
    assert divided.info.groups.count == DIVIDED[name]
    wanted = together(engine_of(whole))
    engine = engine_of(divided)
    assert together(engine) == wanted
    assert together(engine, " again", preempted=False) == wanted, "from the cache"
    for each, prompt in list(PROMPTS.items())[1:]:
        prefill, decode = engine_of(divided), engine_of(divided)
        Ship(prefill, decode, make_job(each, prompt, 24)).land()
        finish(decode)
        assert tokens_of(prefill, each) + tokens_of(decode, each) == wanted[each]


@pytest.mark.skipif(instruction_set() is None, reason="needs the compiled extension")
@pytest.mark.parametrize("kv", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
def test_compiled_kernels_read_windows_from_pages(name: str, kv: torch.dtype, tmp_path: Path) -> None:
    whole, divided = saved(name, tmp_path, CpuOps(), torch.bfloat16)
    whole_layout, layout = (each.info.layout(kv, BLOCK) for each in (whole, divided))
    assert layout.fingerprint("") != whole_layout.fingerprint("")
    width = 16 + (4 if kv is torch.int8 else 0)
    assert layout.block_shape[0] == whole_layout.block_shape[0] // 2
    assert layout.block_shape[-1] == width
    wanted = together(engine_of(whole, kv_dtype=kv))
    engine = engine_of(divided, kv_dtype=kv)
    assert together(engine) == wanted
    assert together(engine, " again", preempted=False) == wanted


@pytest.mark.skipif(instruction_set() is None, reason="needs the compiled extension")
def test_recorded_steps_have_tables_for_windows(tmp_path: Path) -> None:
    """Of these operations, none reads a plan's host side in decodes, as those that are captured on a GPU."""
    whole, divided = saved("cohere2", tmp_path, CpuOps(), torch.bfloat16)
    wanted = together(engine_of(whole))
    form = decoder_form(divided.config, divided.parameters, divided._rotations.rope, divided._scale, divided.logits)
    divided._step = GraphStep(form, divided._one_by_one, replayed)
    engine = engine_of(divided)
    assert together(engine) == wanted
    assert divided._step.sizes, "no step was recorded"


class RowsOfImages(FakeEncoder):
    """Rows as wide as a tiny model's embeddings, whose tokens attend to each other."""

    width = 64

    def encode(self, items: Sequence[MediaItem]) -> list[torch.Tensor]:
        rows = super().encode(items)
        return [torch.sin(each * torch.arange(1, self.width + 1)) for each in rows]


class RowsAtOnce:
    """An `EmbeddingSource` whose rows are here when they are asked for."""

    def __init__(self, encoder: FakeEncoder) -> None:
        self._encoder = encoder

    def submit(self, root: bytes, items: Sequence[MediaItem], ready: Ready, *_: object) -> Callable[[], None]:
        with torch.inference_mode():
            ready(self._encoder.encode(items))
        return lambda: None


@pytest.mark.parametrize("num_blocks", [160, 40])
def test_images_whose_tokens_see_each_other_have_pages_as_a_whole(num_blocks: int, tmp_path: Path) -> None:
    """An image is longer than a window and a step, and in the small pool than what a prompt has pages for else."""
    made = []
    for model in saved("gemma3", tmp_path, ReferenceOps()):
        encoder = RowsOfImages(bidirectional=True)
        engine = engine_of(model, num_blocks, budget=12, encoder=encoder)
        for name, before in (("a", 5), ("b", 30)):
            prompt = prompt_of(PROMPTS["58"][:before], name.encode(), PROMPTS["11"], length=26)
            engine.add(media_job(name, ([min(token, 90) for token in prompt[0]], prompt[1]), 12))
            finish(engine)
        made.append([tokens_of(engine, name) for name in "ab"])
    assert made[0] == made[1]


@pytest.mark.parametrize("name", ["llama3", "mistral-window", "qwen2-window", "gemma3n", "gemma4", "gpt-oss-plain"])
def test_other_models_keep_all_layers_in_one_block(name: str, tmp_path: Path) -> None:
    _, model = saved(name, tmp_path, ReferenceOps())
    assert groups_of(model.config) is None
    assert model.info.groups is None


def test_the_doctor_counts_windows_apart(tmp_path: Path) -> None:
    save_tiny(OURS["gemma3"](), tmp_path)
    source = resolve(str(tmp_path))
    text = model_report(ServeSettings(model=(str(tmp_path),), block_size=8), source)
    assert "MiB for 1,000 tokens and 0.0 MiB for windows" in text
    assert "for windows" not in model_report(
        ServeSettings(model=(str(tmp_path),), kv_remote_url="http://store"), source
    )
