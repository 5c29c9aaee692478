"""What a node loads at its start and when it is asked to, and what it refuses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.engine.adapters import Adapters
from kvferry.engine.models import load_model
from kvferry.engine.models.base import Model
from kvferry.engine.models.hf import transformers_module
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.source import resolve
from kvferry.protocol.adapters import AdapterName, ChangeAdapter
from kvferry.protocol.errors import AdapterNotLoaded, ConfigError, InvalidRequest
from kvferry.protocol.settings import WorkerSettings
from kvferry.protocol.wire import pack
from kvferry.worker.adapters import NodeAdapters, read_first
from tests.adapter_files import save_adapter

SHAPE = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip


class Engine:
    """The engine thread, as far as adapters go."""

    def __init__(self) -> None:
        self.adapters, self.request_table = Adapters(), ()

    def submit(self, call: Any) -> None:
        call(self)

    def holds(self, adapter_id: str) -> bool:
        try:
            return self.adapters.find(adapter_id) is not None
        except AdapterNotLoaded:
            return False


class Asked:
    """A request with a message in it."""

    def __init__(self, message: ChangeAdapter) -> None:
        self._message = message

    async def stream(self) -> AsyncIterator[bytes]:
        yield pack(self._message)


class Node:
    def __init__(self, model: Model, **settings: Any) -> None:
        self.engine, self.told = Engine(), 0
        self.settings = WorkerSettings(**settings)
        self.adapters = NodeAdapters(self.settings, model, self.engine, (), self._announce)  # type: ignore[arg-type]

    async def _announce(self) -> None:
        self.told += 1

    async def change(self, name: str, path: Path | str = "") -> None:
        await self.adapters.post_change(Asked(ChangeAdapter(name, str(path))))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, list[Path]]:
    """A model, and three adapters of it, of which the last two are the same."""
    folder = tmp_path_factory.mktemp("adapters")
    transformers = transformers_module()
    torch.manual_seed(1)
    whole = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SHAPE))
    whole.save_pretrained(folder / "model")
    paths = [save_adapter(folder / name, whole, seed=seed) for name, seed in (("a", 1), ("b", 2), ("c", 2))]
    model = load_model(
        resolve(str(folder / "model")), device=torch.device("cpu"), dtype=torch.float32, ops=ReferenceOps()
    )
    return model, paths


async def test_adapters_come_and_go_and_the_registry_is_told(saved: tuple[Model, list[Path]]) -> None:
    model, (a, b, c) = saved
    node = Node(model)
    for name, path in (("first", a), ("second", b), ("alias", c), ("first", a)):
        await node.change(name, path)
    assert [each.name for each in node.adapters.held] == ["first", "second", "alias"]
    first, second, alias = (each.id for each in node.adapters.held)
    assert second == alias != first
    assert node.told == 4
    await node.change("second")
    assert node.engine.holds(alias), "the other name stands for it still"
    await node.change("alias")
    assert not node.engine.holds(alias)
    assert node.engine.holds(first)
    await node.change("nobody")
    assert node.adapters.held == (AdapterName("first", first),)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_loras": 1}, "1 adapters are loaded, the limit of --max-loras"),
        ({"max_lora_rank": 3}, "rank is 4 and --max-lora-rank is 3"),
        ({"batch_invariant": True}, "not batch-invariant"),
    ],
)
async def test_limits_are_named(settings: dict[str, Any], message: str, saved: tuple[Model, list[Path]]) -> None:
    model, (a, b, _) = saved
    node = Node(model, **settings)
    with pytest.raises(InvalidRequest, match=message):  # noqa: PT012
        await node.change("first", a)
        await node.change("second", b)
    assert len(node.adapters.held) < 2


async def test_a_name_stands_for_one_adapter(saved: tuple[Model, list[Path]]) -> None:
    model, (a, b, _) = saved
    node = Node(model)
    await node.change("mine", a)
    with pytest.raises(InvalidRequest, match="another adapter is loaded as 'mine'"):
        await node.change("mine", b)
    assert len(node.adapters.held) == 1


def test_those_of_the_command_line(saved: tuple[Model, list[Path]]) -> None:
    model, (a, b, _) = saved
    found = read_first(WorkerSettings(lora=(f"x={a}", f"y={b}")), model)
    assert [(name.name, name.id == adapter.id) for name, adapter in found] == [("x", True), ("y", True)]
    for given, message in ((("x",), "name=path"), ((f"x={a}", f"x={b}"), "two adapters"), (("x=/none",), "has no")):
        with pytest.raises(ConfigError, match=message):
            read_first(WorkerSettings(lora=given), model)
